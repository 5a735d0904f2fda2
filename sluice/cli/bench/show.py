"""A load on the terminal: progress while it runs, then its figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sluice.cli.bench.drive import Watch
from sluice.cli.bench.report import Report
from sluice.cli.bench.sample import Sample
from sluice.cli.bench.summary import Spread, Summary, spread

_LAG_WORTH_SAYING_S = 0.05
_BAR = 30


@contextmanager
def show_load(console: Console, watch: Watch) -> Iterator[None]:
    """A live line on a terminal; elsewhere nothing, the caller says what begins."""
    if not console.is_terminal:
        yield
        return
    with Live(_Line(watch), console=console, refresh_per_second=5, transient=True):
        yield


class _Line:
    """Drawn anew at each refresh."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def __rich__(self) -> Text:
        done = list(
            self._watch.samples
        )  # drawn in rich's thread, while the loop's thread adds to it
        failed = sum(not sample.ok for sample in done)
        ttft = spread(sample.ttft_s for sample in done if sample.ok)
        text = Text()
        if self._watch.total:
            filled = _BAR * len(done) // self._watch.total
            text.append("█" * filled + "░" * (_BAR - filled) + f" {len(done)}/{self._watch.total}")
        else:
            text.append(f"{len(done)} done")
        text.append(f"  {self._watch.running} running")
        if ttft:
            text.append(f"  TTFT p50 {_ms(ttft.p50)}, p99 {_ms(ttft.p99)}")
        if failed:
            text.append(f"  {failed} failed", "bold red")
        return text


def print_summary(console: Console, report: Report) -> None:
    s = report.summary
    table = Table(title=report.title, title_justify="left")
    for heading in ("ms", "mean", "p50", "p90", "p95", "p99", "max"):
        table.add_column(heading, justify="left" if heading == "ms" else "right")
    for name, values in latency_rows(s):
        table.add_row(name, *(number(value) for value in values))
    console.print(table)
    for name, value in figure_rows(report):
        console.print(f"{name:<22} {value}", highlight=False, markup=False, soft_wrap=True)
    for warning in warnings(report):
        console.print(f"note: {warning}", style="yellow", highlight=False, soft_wrap=True)


def latency_rows(s: Summary) -> list[tuple[str, tuple[float, ...]]]:
    """(name, mean and percentiles in ms) of what was measured."""
    named: list[tuple[str, Spread | None]] = [
        ("TTFT", s.ttft),
        ("time per output token", s.tpot),
        ("gap between chunks", s.itl),
        ("end to end", s.e2e),
    ]
    return [
        (name, tuple(1000 * value for value in (v.mean, v.p50, v.p90, v.p95, v.p99, v.max)))
        for name, v in named
        if v is not None
    ]


def figure_rows(report: Report) -> list[tuple[str, str]]:
    """(name, value) of everything that isn't a latency."""
    s = report.summary
    rows = [
        ("requests", f"{s.ok} of {s.requests} whole, in {s.wall_s:.1f} s"),
        (
            "throughput",
            f"{s.request_rate:.2f} requests/s, {s.output_tokens_rate:.0f} output tokens/s, "
            f"{s.input_tokens_rate:.0f} input tokens/s",
        ),
    ]
    if report.slo_text():
        rows.append(
            (
                "goodput",
                f"{s.goodput:.2f} requests/s; {100 * s.good_share:.1f} % of all within {report.slo_text()}",
            )
        )
    if s.acceptance is not None:
        rows.append(("acceptance", f"{s.acceptance:.2f} tokens a verify step"))
    if s.cached_tokens is not None and s.cached_share is not None:
        rows.append(("cached prompt tokens", f"{s.cached_tokens} ({100 * s.cached_share:.1f} %)"))
    if s.ttft_parts:
        parts = ", ".join(f"{name.replace('_', ' ')} {_ms(value)}" for name, value in s.ttft_parts)
        rows.append(("server's part of TTFT", f"mean {parts}"))
    for kind, count in s.errors:
        example = next(sample.detail for sample in report.samples if sample.error == kind)
        rows.append((f"failed: {kind}", f"{count} ({example[:120]})"))
    return rows


def warnings(report: Report) -> list[str]:
    """What a reader should know before believing the figures."""
    s = report.summary
    found = []
    if report.interrupted:
        found.append("stopped early; requests that were still open are not in these figures")
    if s.send_lag is not None and s.send_lag.p99 > _LAG_WORTH_SAYING_S:
        found.append(
            f"this client sent up to {_ms(s.send_lag.max)} late (p99 {_ms(s.send_lag.p99)}); that is in the latencies: "
            "use a faster machine or a lower rate to measure the server alone"
        )
    if s.offered_rate and s.request_rate < 0.9 * s.offered_rate and _grows(report.samples):
        found.append(
            f"{s.offered_rate:.2f} requests/s were offered and {s.request_rate:.2f} came back, each later than the one "
            "before: the server fell behind, so these latencies say how long the run was"
        )
    return found


def _grows(samples: Sequence[Sample]) -> bool:
    """The last third took at least twice as long as the first; too few requests say nothing."""
    took = [sample.e2e_s for sample in samples if sample.ok]
    third = len(took) // 3
    return third >= 5 and sum(took[-third:]) > 2 * sum(took[:third])


def _ms(seconds: float) -> str:
    return f"{number(1000 * seconds)} ms"


def number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
