"""The ``sluice bench`` command: options, warm-up, the load with its progress, and the report."""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import httpx
from rich.console import Console

from sluice.cli.bench.drive import Watch, closed_loop, constant, open_loop, poisson
from sluice.cli.bench.html import html_report
from sluice.cli.bench.png import png_report
from sluice.cli.bench.report import Report, figures_json, report_json
from sluice.cli.bench.sample import Asking, Sample, ask
from sluice.cli.bench.show import print_summary, show_load
from sluice.cli.bench.summary import Slo, summarise
from sluice.cli.bench.workload import Item, Lengths, from_texts, from_trace, synthetic
from sluice.cli.endpoint import (
    add_endpoint_arguments,
    endpoint_of,
    error_text,
    http_client,
    served_model,
)
from sluice.errors import ConfigError, InternalError
from sluice.text.tokenizer import ModelTokenizer

_TEXT = (
    "The carriage stood before the door, and the whole family came out to see them go. Mr. Ward, who "
    "had said little at breakfast, now said that the road would be dry, the horses fresh, and the "
    "inn at the bridge no worse than it had been; but nobody believed him about the inn."
)
_MAX_ITEMS = 10_000_000  # of a load that is bounded by time alone
_WARM_LENGTHS = Lengths(16, 16)  # before a trace


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "bench", help="put load on a running router and report what came of it"
    )
    add_endpoint_arguments(parser)
    load = parser.add_argument_group("load: one of")
    one = load.add_mutually_exclusive_group()
    one.add_argument("--rate", type=_positive, metavar="R", help="open loop: R requests a second")
    one.add_argument(
        "--concurrency", type=_count, metavar="N", help="closed loop: N at once (8 unless said)"
    )
    load.add_argument("--arrivals", choices=("poisson", "constant"), default="poisson")
    load.add_argument("--requests", type=_count, metavar="N", help="how many (100 unless said)")
    load.add_argument("--duration", type=_positive, metavar="S", help="send for so many seconds")
    load.add_argument(
        "--warmup", type=int, default=4, metavar="N", help="requests first, not counted"
    )
    what = parser.add_argument_group("prompts")
    what.add_argument("--prompts", type=Path, metavar="FILE", help="texts, one a line")
    what.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake-style JSON lines")
    what.add_argument(
        "--speed", type=_positive, default=1.0, help="of a trace's clock; 2 = twice as fast"
    )
    what.add_argument("--scale", type=_positive, default=1.0, help="of a trace's lengths")
    lengths = "N, LOW-HIGH or MEAN~DEVIATION tokens"
    what.add_argument(
        "--prompt-tokens", type=Lengths.parse, default=Lengths(256, 256), help=lengths
    )
    what.add_argument("--output-tokens", type=Lengths.parse, default=Lengths(64, 64), help=lengths)
    what.add_argument(
        "--shared-prefix", type=int, default=0, metavar="N", help="first N tokens the same in all"
    )
    what.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="for a server without /tokenize"
    )
    what.add_argument("--temperature", type=float, default=0.0)
    what.add_argument("--eos", action="store_true", help="let answers end by themselves")
    what.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--timeout", type=_positive, default=120.0, metavar="S", help="of a request"
    )
    parser.add_argument(
        "--slo",
        action="append",
        default=[],
        metavar="NAME=MS",
        help="what a good request is, in ms: ttft=500, tpot=50 (a token, after the first), e2e=5000; repeatable",
    )
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="write report.json, .html and .png there"
    )
    parser.add_argument("--title", default="", help="of the report")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 when every request came back whole, 1 otherwise. Raises `ConfigError`, `PeerLost`."""
    console = Console(stderr=args.json)
    slo = _slo(args.slo)
    if args.trace and (args.prompts or args.rate):
        raise ConfigError("--trace brings its own prompts and times", stage="bench")
    report = asyncio.run(_measured(args, slo, console))
    if args.json:
        print(figures_json(report))
    else:
        print_summary(console, report)
    if args.out:
        _write(report, args.out, console)
    return 0 if report.summary.ok == report.summary.requests else 1


async def _measured(args: argparse.Namespace, slo: Slo, console: Console) -> Report:
    async with http_client(endpoint_of(args), args.timeout) as client:
        model = await served_model(client)
        asking = Asking(model, args.temperature, not args.eos, args.timeout)
        plan = await _plan(args, client, model)
        watch = Watch(plan.count)

        async def send(item: Item, due_s: float, clock: Any) -> Sample:
            return await ask(client, asking, item, due_s, clock)

        if plan.warm:
            console.print(f"warm-up: {len(plan.warm)} requests", highlight=False)
            for sample in await closed_loop(
                plan.warm, args.concurrency or 4, None, send, Watch(len(plan.warm))
            ):
                if not sample.ok:
                    console.print(f"warm-up failed: {sample.error}: {sample.detail}", markup=False)
        load, loop = _load(args, plan, send, watch)
        console.print(loop, highlight=False)
        with show_load(console, watch):
            interrupted = await _until_interrupted(load)
    if not watch.samples:
        raise InternalError("no request had ended when the load was stopped", stage="bench")
    samples = tuple(sorted(watch.samples, key=lambda sample: sample.due_s))
    return Report(
        args.title or f"{model} at {args.url}",
        str(args.url),
        model,
        loop,
        _options(args),
        interrupted,
        slo,
        summarise(samples, slo),
        samples,
    )


def _load(
    args: argparse.Namespace, plan: _Plan, send: Any, watch: Watch
) -> tuple[Coroutine[Any, Any, Any], str]:
    if plan.times and not args.concurrency:
        return open_loop(plan.items, plan.times, send, watch), (
            f"open loop: {plan.count} requests of {args.trace.name} over {plan.times[-1]:.1f} s"
        )
    if args.rate:
        arrivals = (
            poisson(args.rate, args.seed) if args.arrivals == "poisson" else constant(args.rate)
        )
        return open_loop(plan.items, arrivals, send, watch), (
            f"open loop: {plan.count} requests at {args.rate:g}/s, {args.arrivals}"
        )
    at_once = args.concurrency or 8
    span = f"{plan.count} requests" if plan.count else f"for {args.duration:g} s"
    return closed_loop(plan.items, at_once, args.duration, send, watch), (
        f"closed loop: {span}, {at_once} at once"
    )


async def _until_interrupted(load: Coroutine[Any, Any, Any]) -> bool:
    """True when Ctrl-C ended it; what had come back by then counts."""
    task = asyncio.ensure_future(load)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, task.cancel)
    try:
        await task
    except asyncio.CancelledError:
        return True
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    return False


@dataclass(frozen=True)
class _Plan:
    """``items`` can be gone through once. ``count`` 0: bounded by time alone. ``times`` are a trace's.

    ``warm`` holds requests of their own: a prompt sent twice would find itself cached.
    """

    warm: Sequence[Item]
    items: Iterable[Item]
    count: int
    times: Sequence[float] = ()


async def _plan(args: argparse.Namespace, client: httpx.AsyncClient, model: str) -> _Plan:
    warmup = max(0, args.warmup)
    count = args.requests or (0 if args.duration else 100)
    if args.rate and args.duration:
        count = min(count or _MAX_ITEMS, max(1, round(args.rate * args.duration)))
    drawn = warmup + (count or _MAX_ITEMS)
    if args.prompts:
        texts = from_texts(args.prompts, drawn, args.output_tokens, seed=args.seed)
        return _Plan(list(islice(texts, warmup)), texts, count)
    vocabulary = await _vocabulary(args.tokenizer, client, model)
    if args.trace:
        items = from_trace(
            args.trace,
            vocabulary,
            limit=args.requests,
            speed=args.speed,
            scale=args.scale,
            seed=args.seed,
        )
        warm = synthetic(warmup, _WARM_LENGTHS, _WARM_LENGTHS, vocabulary, seed="warm-up")
        return _Plan(list(warm), items, len(items), [item.at_s or 0.0 for item in items])
    made = synthetic(
        drawn,
        args.prompt_tokens,
        args.output_tokens,
        vocabulary,
        shared_prefix=args.shared_prefix,
        seed=args.seed,
    )
    return _Plan(list(islice(made, warmup)), made, count)


async def _vocabulary(
    tokenizer: Path | None, client: httpx.AsyncClient, model: str
) -> tuple[int, ...]:
    """Ids of ordinary words, from a folder or from the server."""
    if tokenizer is not None:
        return tuple(sorted(set(ModelTokenizer.load(tokenizer).encode(_TEXT))))
    body = {"model": model, "prompt": _TEXT, "add_special_tokens": False}
    response = await client.post("/tokenize", json=body)
    if response.status_code != 200:
        raise ConfigError(
            f"{client.base_url}tokenize answered {response.status_code}: {error_text(response)}",
            stage="bench",
            remedy="give --tokenizer FOLDER, or texts with --prompts FILE",
        )
    return tuple(sorted(set(response.json()["tokens"])))


def _slo(wishes: Sequence[str]) -> Slo:
    limits: dict[str, float] = {}
    for wish in wishes:
        name, _, value = wish.partition("=")
        try:
            limits[name] = float(value) / 1000
        except ValueError:
            name = ""
        if name not in ("ttft", "tpot", "e2e"):
            raise ConfigError(
                f"--slo {wish}: not understood",
                stage="bench",
                remedy="use ttft=MS, tpot=MS or e2e=MS",
            )
    return Slo(limits.get("ttft"), limits.get("tpot"), limits.get("e2e"))


def _options(args: argparse.Namespace) -> str:
    skipped = ("run", "api_key", "url", "title", "out", "json", "ca")
    return ", ".join(
        f"{name.replace('_', '-')}={value}"
        for name, value in sorted(vars(args).items())
        if name not in skipped and value not in (None, [], False)
    )


def _write(report: Report, folder: Path, console: Console) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(report_json(report) + "\n")
    (folder / "report.html").write_text(html_report(report), encoding="utf-8")
    written = ["report.json", "report.html"]
    if png_report(report, folder / "report.png"):
        written.append("report.png")
    else:
        console.print("no report.png: matplotlib is not installed", highlight=False)
    console.print(f"written: {', '.join(str(folder / name) for name in written)}", soft_wrap=True)


def _positive(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise ValueError(f"{text} is not positive")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(f"{text} is not at least 1")
    return value
