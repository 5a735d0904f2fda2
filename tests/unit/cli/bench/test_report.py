"""The report: every figure on the page, no way out of it for a server's words, charts with round ticks."""

from __future__ import annotations

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.cli.bench.charts import charts
from sluice.cli.bench.html import html_report
from sluice.cli.bench.png import png_report
from sluice.cli.bench.report import Report, figures_json, report_json
from sluice.cli.bench.show import figure_rows, warnings
from sluice.cli.bench.summary import Slo, summarise
from sluice.cli.bench.svg import ticks
from tests.unit.cli.bench.samples import sample


def _report(*samples: object, slo: Slo | None = None) -> Report:
    chosen = samples or (
        sample(0.0, 0.1, 0.2, 0.4, tokens=6, cached=5, steps=2, accepted=3),
        sample(0.5, 0.9, 1.0, tokens=2, cached=5, steps=1, accepted=0),
        sample(1.0, error="500 <b>Bug</b>", end=1.1),
    )
    slo = slo or Slo(ttft_s=0.2)
    summary = summarise(chosen, slo)  # type: ignore[arg-type]
    return Report(
        "<title> & co", "http://r", "m", "loop", "a=1", False, slo, summary, tuple(chosen)
    )  # type: ignore[arg-type]


class _Tags(HTMLParser):
    """Checks that every tag that opens also closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    page = html_report(_report())
    tags = _Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.links == []
    assert "<script" not in page
    assert "<b>Bug" not in page
    assert "<title>&lt;title&gt; &amp; co</title>" in page
    assert page.count("<svg") == 6
    assert "nan" not in page.lower()
    for text in ("2/3", "33.3 %", "2.00", "within TTFT 200 ms", "failed: 500"):
        assert text in page


def test_a_page_of_failures_alone() -> None:
    report = _report(sample(0.0, error="timeout", end=2.0))
    page = html_report(report)
    assert "0/1" in page
    assert page.count("<svg") == 3  # over the run: when they failed, no token, how many were open


def test_the_servers_parts_of_ttft_make_a_bar_that_is_whole() -> None:
    page = html_report(_report(sample(0.0, 0.5, steps=1), sample(0.0, 0.7, steps=1)))
    widths = [float(width) for width in re.findall(r'style="width: ([\d.]+)%"', page)]
    assert widths == pytest.approx([16.67, 33.33, 50.0])
    assert "queue 100 ms" in page
    assert "the rest 300 ms" in page
    # Parts that are more than the whole are somebody's mistake: better no bar than a wrong one.
    assert "width: " not in html_report(_report(sample(0.0, 0.1, steps=1))).split("<body>")[1]


def test_long_times_are_seconds_on_a_card() -> None:
    page = html_report(_report(sample(0.0, 12.34), sample(0.0, 0.5)))
    assert "<b>0.50 / 12.3</b><span>TTFT p50 / p99, s</span>" in page


def test_points_of_the_share_charts_end_at_all_requests() -> None:
    ttft = charts(_report())[0]
    assert ttft.series[0].points == ((100.0, 0.0), (100.0, 50.0), (400.0, 100.0))
    assert ttft.limit == 200.0


def test_tokens_over_the_run_add_up() -> None:
    report = _report()
    tokens = next(chart for chart in charts(report) if chart.title.startswith("Output tokens"))
    points = tokens.series[0].points
    width = points[1][0] - points[0][0]
    assert sum(rate * width for _, rate in points[:-1]) == pytest.approx(8)


def test_json_has_all_and_figures_only_the_sums() -> None:
    report = _report()
    whole, figures = json.loads(report_json(report)), json.loads(figures_json(report))
    assert len(whole["samples"]) == 3
    assert whole["summary"] == figures["summary"]
    assert "samples" not in figures


def test_a_reader_is_warned() -> None:
    fine = _report()
    assert warnings(fine) == []
    late = [sample(i / 10, 2.0 + i, sent=i / 10 + 0.5) for i in range(20)]
    said = " ".join(warnings(replace(_report(*late), interrupted=True)))
    short = _report(*(sample(i / 10, 2.0 + i / 10) for i in range(20)))
    assert warnings(short) == []  # its rate lags only because its last answers take their time
    for part in ("stopped early", "this client sent", "fell behind"):
        assert part in said


def test_errors_come_with_an_example() -> None:
    assert ("failed: 500 <b>Bug</b>", "1 (detail of 500 <b>Bug</b>)") in figure_rows(_report())


@given(st.floats(1e-6, 1e9))
def test_ticks_are_round_few_and_within(high: float) -> None:
    found = ticks(0, high)
    assert 2 <= len(found) <= 6
    assert found[0] == 0
    assert found[-1] <= high * (1 + 1e-6)
    step = found[1]
    mantissa = step / 10 ** math.floor(math.log10(step) + 1e-9)
    assert any(math.isclose(mantissa, size, rel_tol=1e-6) for size in (1, 2, 2.5, 5, 10))


def test_a_picture_where_matplotlib_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert png_report(_report(), tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not png_report(_report(), tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()


def test_axes_hold_every_point() -> None:
    page = html_report(_report())
    for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', page):
        assert 0 <= float(x) <= 460
        assert 0 <= float(y) <= 262
