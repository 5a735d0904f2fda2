"""A `Chart` as one inline SVG: no script, colours from the page's variables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from sluice.cli.bench.charts import Chart, Point, Series

_WIDTH, _HEIGHT = 460, 262
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 14, 50, 40
_TICKS = 5


def svg(chart: Chart) -> str:
    """At least one series has a point."""
    axes = _Axes(chart)
    body = [
        f'<text class="title" x="{_LEFT - 44}" y="18">{escape(chart.title)}</text>',
        *axes.grid(),
        *(_draw(series, axes) for series in chart.series if series.points),
        *axes.limit(),
        *_legend(chart),
    ]
    label = escape(chart.title)
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{label}">'
        + "".join(body)
        + "</svg>"
    )


class _Axes:
    """From values to places."""

    def __init__(self, chart: Chart) -> None:
        self._chart = chart
        points = [point for series in chart.series for point in series.points]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        if chart.limit is not None:
            (ys if chart.limit_on_y else xs).append(chart.limit)
        self._x_ticks = ticks(0, max(xs))
        self._y_ticks = ticks(0, max(ys))
        self._x_end = max(max(xs), 1e-9) * 1.02
        self._y_end = max(self._y_ticks[-1], max(ys) * 1.02)

    def place(self, point: Point) -> tuple[float, float]:
        x = _LEFT + point[0] / self._x_end * (_WIDTH - _LEFT - _RIGHT)
        y = _HEIGHT - _BOTTOM - point[1] / self._y_end * (_HEIGHT - _TOP - _BOTTOM)
        return round(x, 1), round(y, 1)

    def grid(self) -> list[str]:
        parts = []
        right, low = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        for value in self._y_ticks:
            _, y = self.place((0, value))
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>')
            parts.append(
                f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_tick(value)}</text>'
            )
        for value in self._x_ticks:
            x, _ = self.place((value, 0))
            if x <= right:
                parts.append(
                    f'<text x="{x}" y="{low + 16}" text-anchor="middle">{_tick(value)}</text>'
                )
        middle = (_LEFT + right) / 2
        parts.append(
            f'<text class="axis" x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">'
            f"{escape(self._chart.x_label)}</text>"
        )
        parts.append(
            f'<text class="axis" x="{_LEFT - 44}" y="{_TOP - 15}">{escape(self._chart.y_label)}</text>'
        )
        return parts

    def limit(self) -> list[str]:
        limit = self._chart.limit
        if limit is None:
            return []
        right, low = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        x, y = self.place((limit, limit))
        if self._chart.limit_on_y:
            line = f'<line class="limit" x1="{_LEFT}" x2="{right}" y1="{y}" y2="{y}"/>'
            return [line, f'<text class="slo" x="{right}" y="{y - 4}" text-anchor="end">SLO</text>']
        line = f'<line class="limit" x1="{x}" x2="{x}" y1="{_TOP}" y2="{low}"/>'
        anchor = "end" if x > right - 40 else "start"
        shift = -4 if anchor == "end" else 4
        return [
            line,
            f'<text class="slo" x="{x + shift}" y="{low - 6}" text-anchor="{anchor}">SLO</text>',
        ]


def _draw(series: Series, axes: _Axes) -> str:
    kind = "bad" if series.bad else "good"
    places = [axes.place(point) for point in series.points]
    if series.dots:
        return "".join(f'<circle class="dot {kind}" cx="{x}" cy="{y}" r="2.6"/>' for x, y in places)
    path = f"M{places[0][0]} {places[0][1]}"
    for x, y in places[1:]:
        path += f"H{x}V{y}" if series.steps else f"L{x} {y}"
    return f'<path class="line {kind}" d="{path}"/>'


def _legend(chart: Chart) -> list[str]:
    named = [series for series in chart.series if series.name and series.points]
    if len(named) < 2:
        return []
    parts, x = [], _WIDTH - _RIGHT - 60 * len(named)
    for series in named:
        kind = "bad" if series.bad else "good"
        parts.append(f'<circle class="dot {kind}" cx="{x}" cy="14" r="3.5"/>')
        parts.append(f'<text x="{x + 8}" y="18">{escape(series.name)}</text>')
        x += 60
    return parts


def ticks(low: float, high: float) -> Sequence[float]:
    """Round values from ``low`` (a round value itself) to ``high`` or just below, about five of them."""
    span = max(high - low, 1e-9)
    raw = span / _TICKS
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(size * magnitude for size in (1, 2, 2.5, 5, 10) if size * magnitude >= raw)
    return [low + index * step for index in range(math.floor(span / step + 1e-9) + 1)]


def _tick(value: float) -> str:
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"
