"""The report as one page that needs nothing else: no script, no network."""

from __future__ import annotations

from html import escape

from sluice.cli.bench.charts import charts
from sluice.cli.bench.report import Report
from sluice.cli.bench.show import figure_rows, latency_rows, number, warnings
from sluice.cli.bench.svg import svg

_LONG_S = 10.0  # from here on a card shows seconds
_STYLE = """
:root { --ink: #1c2430; --soft: #5d6a7b; --page: #f6f7f9; --card: #fff; --edge: #dfe4ea;
  --good: #1f77b4; --bad: #c8372d }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6eaf0; --soft: #98a4b3; --page: #14181e; --card: #1d232b; --edge: #333c48;
    --good: #5aa9e6; --bad: #ef6f65 }
}
* { box-sizing: border-box }
body { margin: 0 auto; padding: 28px 20px 48px; max-width: 1040px; color: var(--ink); background: var(--page);
  font: 15px/1.5 system-ui, sans-serif }
h1 { font-size: 23px; margin: 0 0 2px }
p { margin: 2px 0; color: var(--soft) }
.cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; margin: 20px 0 }
.card, .chart, .parts, table { background: var(--card); border: 1px solid var(--edge); border-radius: 8px }
.card { padding: 11px 12px }
.card b { display: block; font-size: 18px; white-space: nowrap; line-height: 1.3; font-variant-numeric: tabular-nums }
.card span { color: var(--soft); font-size: 13px }
.note { border-left: 4px solid var(--bad); background: var(--card); color: var(--ink); padding: 8px 12px;
  margin: 10px 0 }
table { border-collapse: separate; border-spacing: 0; width: 100%; margin: 16px 0; overflow: hidden }
th, td { padding: 7px 12px; text-align: right; border-top: 1px solid var(--edge); font-variant-numeric: tabular-nums }
tr:first-child th { border-top: 0; color: var(--soft); font-weight: 500 }
th:first-child, td:first-child { text-align: left }
table.figures td { text-align: left; overflow-wrap: anywhere }
table.figures td:first-child { color: var(--soft); white-space: nowrap; width: 1% }
table.figures tr:first-child td { border-top: 0 }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(440px, 100%), 1fr)); gap: 14px }
.chart { padding: 8px }
svg { width: 100%; height: auto; display: block; font: 11px system-ui, sans-serif }
svg text { fill: var(--soft) } svg .title { fill: var(--ink); font-size: 13px; font-weight: 600 }
.grid { stroke: var(--edge) } .line { fill: none; stroke-width: 1.8 } .line.good { stroke: var(--good) }
.dot.good { fill: var(--good); fill-opacity: .55 } .dot.bad { fill: var(--bad) }
.limit { stroke: var(--bad); stroke-dasharray: 5 4 } svg .slo { fill: var(--bad) }
.parts { padding: 10px 14px 12px; margin: 16px 0 } .parts b { font-size: 13px }
.bar { display: flex; height: 16px; border-radius: 4px; overflow: hidden; margin: 8px 0 }
.bar i { display: block; height: 100% } .names { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 13px }
.names i { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px }
.p0 { background: #8c9bae } .p1 { background: #1f77b4 } .p2 { background: #e08e2b } .p3 { background: #7b5ea7 }
.p4 { background: #3a9a6b } .p5 { background: #c9ced6 }
footer { margin-top: 22px; color: var(--soft); font-size: 13px }
"""


def html_report(report: Report) -> str:
    notes = "".join(f'<p class="note">{escape(text)}</p>' for text in warnings(report))
    drawn = "".join(f'<div class="chart">{svg(chart)}</div>' for chart in charts(report))
    figures = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in figure_rows(report)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_STYLE}</style></head><body>"
        f"<h1>{escape(report.title)}</h1><p>{escape(report.loop)}</p>{notes}"
        f'<div class="cards">{_cards(report)}</div>{_latencies(report)}{_parts(report)}'
        f'<div class="charts">{drawn}</div><table class="figures">{figures}</table>'
        "<footer>Latencies count from when the schedule wanted a request sent, and are of requests that came back "
        "whole; failed ones count against the SLO. Percentiles are nearest-rank. "
        f"Options: {escape(report.options)}</footer></body></html>\n"
    )


def _cards(report: Report) -> str:
    s = report.summary
    cards = [
        (f"{s.ok}/{s.requests}", "requests came back whole"),
        (f"{number(s.output_tokens_rate)}/s", "output tokens"),
    ]
    for name, times in (("TTFT", s.ttft), ("TPOT", s.tpot)):
        if times is not None:
            unit, scale = ("s", 1.0) if times.p99 >= _LONG_S else ("ms", 1000.0)
            value = f"{number(scale * times.p50)} / {number(scale * times.p99)}"
            cards.append((value, f"{name} p50 / p99, {unit}"))
    if report.slo_text():
        cards.append((f"{100 * s.good_share:.1f} %", f"within {report.slo_text()}"))
    if s.acceptance is not None:
        cards.append((f"{s.acceptance:.2f}", "tokens a verify step"))
    return "".join(
        f'<div class="card"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in cards
    )


def _parts(report: Report) -> str:
    """Where the mean TTFT went, as one bar: what the pods say, and the rest."""
    s = report.summary
    known = sum(seconds for _, seconds in s.ttft_parts)
    if s.ttft is None or not 0 < known <= s.ttft.mean:
        return ""
    parts = [*s.ttft_parts, ("the rest", s.ttft.mean - known)]
    bar = "".join(
        f'<i class="p{index % 6}" style="width: {100 * seconds / s.ttft.mean:.2f}%"></i>'
        for index, (_, seconds) in enumerate(parts)
    )
    names = "".join(
        f'<span><i class="p{index % 6}"></i>{escape(name.replace("_", " "))} {number(1000 * seconds)} ms</span>'
        for index, (name, seconds) in enumerate(parts)
    )
    return (
        '<div class="parts"><b>Where the mean time to first token went</b>'
        f'<div class="bar">{bar}</div><div class="names">{names}</div></div>'
    )


def _latencies(report: Report) -> str:
    heads = "".join(
        f"<th>{name}</th>" for name in ("ms", "mean", "p50", "p90", "p95", "p99", "max")
    )
    rows = "".join(
        f"<tr><td>{escape(name)}</td>" + "".join(f"<td>{number(v)}</td>" for v in values) + "</tr>"
        for name, values in latency_rows(report.summary)
    )
    return f"<table><tr>{heads}</tr>{rows}</table>"
