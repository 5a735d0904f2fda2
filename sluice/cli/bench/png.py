"""The report's charts as one picture, where matplotlib is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.cli.bench.charts import Chart, charts
from sluice.cli.bench.report import Report

_COLUMNS = 3
_GOOD, _BAD = "#1f77b4", "#c8372d"


def png_report(report: Report, file: Path) -> bool:
    """False when matplotlib isn't there; then nothing is written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return False
    drawn = charts(report)
    rows = -(-len(drawn) // _COLUMNS) or 1
    figure = Figure(figsize=(5 * _COLUMNS, 3.4 * rows), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{report.title}\n{report.loop}", fontsize=12)
    for index, chart in enumerate(drawn):
        _draw(figure.add_subplot(rows, _COLUMNS, index + 1), chart)
    figure.savefig(file, dpi=110)
    return True


def _draw(axes: Any, chart: Chart) -> None:
    for series in chart.series:
        if not series.points:
            continue
        xs, ys = zip(*series.points, strict=True)
        color = _BAD if series.bad else _GOOD
        if series.dots:
            axes.plot(xs, ys, ".", color=color, alpha=0.6, label=series.name)
        else:
            style = "steps-post" if series.steps else "default"
            axes.plot(xs, ys, color=color, drawstyle=style)
    if chart.limit is not None:
        line = axes.axhline if chart.limit_on_y else axes.axvline
        line(chart.limit, color=_BAD, linestyle="--", linewidth=1, label="SLO")
    if sum(bool(series.name and series.points) for series in chart.series) > 1:
        axes.legend(fontsize=8)
    axes.set(title=chart.title, xlabel=chart.x_label, ylabel=chart.y_label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
