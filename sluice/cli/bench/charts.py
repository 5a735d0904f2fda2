"""The charts of a report as data: the same for the page and for the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from sluice.cli.bench.report import Report
from sluice.cli.bench.sample import Sample

Point = tuple[float, float]
_BINS = 60
_MOST_DOTS = 3000  # a page with more is slow and no clearer


@dataclass(frozen=True)
class Series:
    """``dots`` are measurements, a line is something continuous; ``bad`` is drawn in the colour of failures."""

    name: str
    points: tuple[Point, ...]
    dots: bool = False
    bad: bool = False
    steps: bool = False  # a line that stays until the next point


@dataclass(frozen=True)
class Chart:
    """``limit`` is the SLO: a value of x, or of y with ``limit_on_y``."""

    title: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    limit: float | None = None
    limit_on_y: bool = False


def charts(report: Report) -> list[Chart]:
    """Those for which something was measured."""
    samples = report.samples
    slo = report.slo
    whole = [sample for sample in samples if sample.ok]
    found = [
        _share("Time to first token", (sample.ttft_s for sample in whole), slo.ttft_s),
        _share("Time per output token", (sample.tpot_s for sample in whole), slo.tpot_s),
        _share("End to end", (sample.e2e_s for sample in whole), slo.e2e_s),
        Chart(
            "Time to first token, over the run",
            "due at, s",
            "ms",
            (
                _dots("whole", samples, lambda s: s.ttft_s if s.ok else None),
                _dots("failed", samples, lambda s: None if s.ok else s.e2e_s, bad=True),
            ),
            None if slo.ttft_s is None else 1000 * slo.ttft_s,
            limit_on_y=True,
        ),
        Chart("Output tokens a second, over the run", "s", "tokens/s", (_tokens(samples),)),
        Chart("Requests open, over the run", "s", "requests", (_open(samples),)),
    ]
    return [chart for chart in found if any(series.points for series in chart.series)]


def _share(title: str, values: Iterable[float | None], limit_s: float | None) -> Chart:
    """How many of the requests took at most so long."""
    known = sorted(1000 * value for value in values if value is not None)
    step = max(1, len(known) // _MOST_DOTS)
    points = [(value, 100 * (rank + 1) / len(known)) for rank, value in enumerate(known)]
    kept = points[::step] + points[-1:] if step > 1 else points
    if kept:
        kept = [(kept[0][0], 0.0), *kept]
    limit = None if limit_s is None else 1000 * limit_s
    return Chart(title, "ms", "% of requests", (Series("", tuple(kept), steps=True),), limit)


def _dots(
    name: str, samples: Sequence[Sample], value: Callable[[Sample], float | None], bad: bool = False
) -> Series:
    seen = [(sample.due_s, value(sample)) for sample in samples]
    points = [(at, 1000 * seconds) for at, seconds in seen if seconds is not None]
    return Series(name, tuple(points[:: max(1, len(points) // _MOST_DOTS)]), dots=True, bad=bad)


def _tokens(samples: Sequence[Sample]) -> Series:
    """Tokens of a chunk count when it arrived; a chunk has its answer's mean share of them."""
    end = max(sample.end_s for sample in samples)
    width = max(end / _BINS, 1e-6)
    bins = [0.0] * _BINS
    for sample in samples:
        for at in sample.chunks_s:
            bins[min(int(at / width), _BINS - 1)] += sample.output_tokens / len(sample.chunks_s)
    points = [(index * width, tokens / width) for index, tokens in enumerate(bins)]
    return Series("", (*points, (end, points[-1][1])), steps=True)


def _open(samples: Sequence[Sample]) -> Series:
    changes = sorted([(s.sent_s, 1) for s in samples] + [(s.end_s, -1) for s in samples])
    points: list[Point] = [(0.0, 0.0)]
    running = 0
    for at, change in changes:
        running += change
        points.append((at, float(running)))
    return Series("", tuple(points[:: max(1, len(points) // _MOST_DOTS)]), steps=True)
