"""Names and units follow one rule, and a name means one thing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sluice.telemetry.catalogue import ALL, BY_ROLE, Kind, Metric, markdown_table

UNITS = ("_seconds", "_bytes", "_tokens", "_bytes_per_second", "_timestamp_seconds")


def test_every_name_is_declared_once() -> None:
    names = [metric.name for metric in ALL]
    assert len(names) == len(set(names))
    assert {m.name for role in BY_ROLE.values() for m in role} == set(names)


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.name)
def test_a_name_says_role_and_unit(metric: Metric) -> None:
    assert metric.name.startswith(
        ("sluice_router_", "sluice_pod_", "sluice_decode_", "sluice_prefill_")
    )
    assert metric.name.endswith("_total") == (metric.kind is Kind.COUNTER)
    if metric.kind is Kind.HISTOGRAM:
        assert metric.name.endswith(UNITS)
        assert list(metric.buckets) == sorted(set(metric.buckets))
    assert metric.help.endswith(".")


def test_the_table_has_a_row_for_each_metric() -> None:
    assert markdown_table(ALL).count("\n") == len(ALL) + 1


def test_the_manual_has_exactly_this_table() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    assert markdown_table(ALL) in manual, (
        "paste: python -c 'from sluice.telemetry.catalogue import *; print(markdown_table(ALL))'"
    )


def test_the_manual_names_no_metric_that_does_not_exist() -> None:
    manual = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    names = {metric.name for metric in ALL}
    suffixes = ("_bucket", "_sum", "_count")
    for found in set(re.findall(r"\bsluice_(?:router|pod|decode|prefill)_\w+", manual)):
        bare = next((found.removesuffix(s) for s in suffixes if found.endswith(s)), found)
        assert {found, bare} & names, found
