"""``sluice status``: can the router serve, on which pairs, and why not on the others.

Exit codes: 0 it can serve, 1 it can't, 2 nobody could be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import httpx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sluice.cli.endpoint import add_endpoint_arguments, endpoint_of, http_client
from sluice.errors import ConfigError, PeerLost, SluiceError

_TIMEOUT_S = 5.0
_SERVES, _DOES_NOT = 0, 1


@dataclass(frozen=True)
class PairLine:
    """From ``state`` on it is what ``/status.json`` adds; ``/ready`` only names pairs that can serve."""

    decode: str
    prefill: str
    state: str = "agreed"
    usable: bool = True
    reason: str = ""
    in_flight: int | None = None
    canary: str = ""  # what the last one found


@dataclass(frozen=True)
class PodLine:
    """``fullest``: the space most in use, by requests. ``acceptance``: tokens a verify step, lately."""

    role: str
    address: str
    ready: bool
    reason: str
    queued: int
    running: int
    capacity: int
    fullest: str
    acceptance: float | None


@dataclass(frozen=True)
class Totals:
    answers_per_s: float
    tokens_per_s: float
    running: int
    waiting: int
    failures: int
    ttft_p50_s: float | None
    ttft_p95_s: float | None


@dataclass(frozen=True)
class Status:
    """``pods`` and ``totals`` only from ``/status.json``."""

    ready: bool
    pairs: tuple[PairLine, ...]
    reasons: tuple[str, ...]
    pods: tuple[PodLine, ...] = ()
    alarms: tuple[str, ...] = ()
    totals: Totals | None = None


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("status", help="can a running router serve, and if not why")
    add_endpoint_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--watch",
        type=float,
        nargs="?",
        const=2.0,
        metavar="S",
        help="show it anew every S seconds (2 unless said), until Ctrl-C",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.watch is not None and (args.json or not args.watch > 0):
        raise ConfigError("--watch wants a positive number of seconds and no --json", stage="start")
    console = Console()
    if args.watch is None:
        status = asyncio.run(_once(args))
        if args.json:
            print(json.dumps(asdict(status), indent=2))
        else:
            console.print(_table(status))
        return _SERVES if status.ready else _DOES_NOT
    try:
        return asyncio.run(_watch(args, console))
    except KeyboardInterrupt:
        return _SERVES


async def _once(args: argparse.Namespace) -> Status:
    async with http_client(endpoint_of(args), _TIMEOUT_S) as client:
        return await read_status(client)


async def _watch(args: argparse.Namespace, console: Console) -> int:
    """A router that comes and goes is part of the picture: it doesn't end the watching."""
    async with http_client(endpoint_of(args), _TIMEOUT_S) as client:
        with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
            while True:
                try:
                    shown: Any = _table(await read_status(client))
                except SluiceError as error:
                    shown = Text(str(error), "bold red")
                live.update(shown, refresh=True)
                await asyncio.sleep(args.watch)


async def read_status(client: httpx.AsyncClient) -> Status:
    """``/ready``, and what ``/status.json`` adds to it. Raises `PeerLost`, `ConfigError` when it's no Sluice router."""
    try:
        answer = await client.get("/ready")
        more = await client.get("/status.json")
    except httpx.TransportError as error:
        raise PeerLost(
            f"{client.base_url}: {error or type(error).__name__}",
            stage="status",
            remedy="is the router up, and is this its URL?",
        ) from error
    try:
        ready = answer.json()
        pairs = tuple(PairLine(pair["decode"], pair["prefill"]) for pair in ready["pairs"])
        status = Status(bool(ready["ready"]), pairs, tuple(ready["reasons"]))
        return status if more.status_code != 200 else _with_fleet(status, more.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{client.base_url} answers {answer.status_code}, but not as a Sluice router: {error!r}",
            stage="status",
        ) from error


def _with_fleet(status: Status, seen: Any) -> Status:
    totals = seen["totals"]
    return replace(
        status,
        pairs=tuple(
            PairLine(
                pair["decode"],
                pair["prefill"],
                pair["state"],
                pair["usable"],
                pair["reason"]
                or ("" if pair["breaker"] == "closed" else f"breaker {pair['breaker']}"),
                pair["in_flight"],
                _canary(pair["canary"]),
            )
            for pair in seen["pairs"]
        ),
        pods=tuple(_pod(pod) for pod in seen["pods"]),
        alarms=tuple(seen["alarms"]),
        totals=Totals(*(totals[item.name] for item in fields(Totals))),
    )


def _pod(pod: Any) -> PodLine:
    used = [
        ((pool["held"] + pool["quarantined"]) / pool["total"], pool["space"])
        for pool in pod["pools"]
        if pool["total"]
    ]
    share, space = max(used, default=(0.0, ""))
    return PodLine(
        pod["role"],
        pod["address"],
        pod["ready"],
        pod["reason"],
        pod["queued"],
        pod["running"],
        pod["capacity"],
        f"{space} {100 * share:.0f} %" if space else "",
        pod["drafting"]["recent_tokens"] if pod["drafting"] else None,
    )


def _canary(canary: Any) -> str:
    if canary is None:
        return ""
    result = canary["failure"] or f"{1000 * canary['seconds']:.0f} ms"
    return f"{result}, {canary['age_s']:.0f} s ago"


def _table(status: Status) -> Group:
    parts: list[Any] = [
        Text("ready", "bold green") if status.ready else Text("not ready", "bold red")
    ]
    parts += [Text(f"! {alarm}", "bold yellow") for alarm in status.alarms]
    if status.totals is not None:
        parts.append(Text(_totals(status.totals)))
    if status.pods:
        parts.append(_pods(status.pods))
    if status.pairs:
        parts.append(_pairs(status.pairs))
    parts += [Text(f"• {reason}") for reason in status.reasons]
    return Group(*parts)


def _totals(t: Totals) -> str:
    known = [("p50", t.ttft_p50_s), ("p95", t.ttft_p95_s)]
    ttft = ", ".join(f"{name} {1000 * s:.0f} ms" for name, s in known if s is not None)
    return (
        f"{t.answers_per_s:.1f} answers/s, {t.tokens_per_s:.0f} tokens/s, {t.running} running, {t.waiting} waiting, "
        f"{t.failures} failed{'; TTFT ' + ttft if ttft else ''}"
    )


def _pods(pods: Sequence[PodLine]) -> Table:
    table = _grid("pods", "role", "address", "state", "queued", "running", "fullest", "acceptance")
    for pod in pods:
        state = Text("ready", "green") if pod.ready else Text(pod.reason or "not ready", "red")
        running = f"{pod.running}/{pod.capacity}" if pod.capacity else str(pod.running)
        accepted = "" if pod.acceptance is None else f"{pod.acceptance:.2f}"
        table.add_row(pod.role, pod.address, state, str(pod.queued), running, pod.fullest, accepted)
    return table


def _pairs(pairs: Sequence[PairLine]) -> Table:
    table = _grid("pairs", "decode", "prefill", "state", "running", "canary", "reason")
    for pair in pairs:
        style = "green" if pair.usable else "yellow"
        running = "" if pair.in_flight is None else str(pair.in_flight)
        table.add_row(
            pair.decode,
            pair.prefill,
            Text(pair.state, style),
            running,
            Text(pair.canary),
            Text(pair.reason),
        )
    return table


def _grid(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
