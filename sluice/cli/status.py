"""``sluice status``: can the router serve, on which pairs, and why not on the others.

Exit codes: 0 it can serve, 1 it can't, 2 nobody could be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict, dataclass
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
    """``state`` and what follows: empty when the router only says that the pair can serve."""

    decode: str
    prefill: str
    state: str = "agreed"
    reason: str = ""
    in_flight: int | None = None


@dataclass(frozen=True)
class PodLine:
    role: str
    address: str
    state: str
    running: str
    problem: str


@dataclass(frozen=True)
class Status:
    """``pods`` is empty unless the router has ``/status.json`` and our key opens it."""

    ready: bool
    pairs: tuple[PairLine, ...]
    pods: tuple[PodLine, ...]
    reasons: tuple[str, ...]


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
        status = Status(bool(ready["ready"]), pairs, (), tuple(ready["reasons"]))
        return status if more.status_code != 200 else _with_fleet(status, more.json())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{client.base_url} answers {answer.status_code}, but not as a Sluice router: {error!r}",
            stage="status",
        ) from error


def _with_fleet(status: Status, fleet: Any) -> Status:
    pairs = tuple(
        PairLine(
            pair["decode"],
            pair["prefill"],
            pair["state"],
            pair.get("reason", ""),
            pair.get("in_flight"),
        )
        for pair in fleet["pairs"]
    )
    pods = tuple(
        PodLine(
            pod["role"],
            pod["address"],
            str(pod.get("state") or "known from decode"),
            f"{pod['in_use']}/{pod['capacity']}"
            if pod.get("capacity")
            else str(pod.get("in_use", "")),
            pod.get("problem", ""),
        )
        for pod in fleet["pods"]
    )
    return Status(status.ready, pairs, pods, status.reasons)


def _table(status: Status) -> Group:
    verdict = Text("ready", "bold green") if status.ready else Text("not ready", "bold red")
    parts: list[Any] = [verdict]
    if status.pods:
        pods = _grid("pods", "role", "address", "state", "running", "problem")
        for pod in status.pods:
            pods.add_row(pod.role, pod.address, pod.state, pod.running, Text(pod.problem, "red"))
        parts.append(pods)
    if status.pairs:
        pairs = _grid("pairs", "decode", "prefill", "state", "running", "reason")
        for pair in status.pairs:
            style = "green" if pair.state == "agreed" else "yellow"
            running = "" if pair.in_flight is None else str(pair.in_flight)
            pairs.add_row(
                pair.decode, pair.prefill, Text(pair.state, style), running, Text(pair.reason)
            )
        parts.append(pairs)
    parts += [Text(f"• {reason}") for reason in status.reasons]
    return Group(*parts)


def _grid(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table
