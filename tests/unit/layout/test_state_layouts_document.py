"""``docs/state-layouts.md`` is true: its tables and numbers are computed here."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import pytest

from sluice.layout.component import Coverage, Space
from sluice.layout.explain import explain_layout
from sluice.layout.span import pair_runs, span
from tests.unit.layout.example_layouts import FLASH, Pod, layout_of
from tests.unit.layout.test_span import FakeTables

TEXT = (Path(__file__).parents[3] / "docs" / "state-layouts.md").read_text()


def test_the_printed_prompt_is_what_show_prints() -> None:
    shown = explain_layout(layout_of(FLASH, Pod(kv_dtype="bfloat16")), 1000).split("\n\n")[-1]
    assert textwrap.indent(shown, "    ") in TEXT


def test_the_worked_example_is_computed_by_span() -> None:
    layout, tables = layout_of(FLASH, Pod()), FakeTables(128, 3, [7, 8, 4], [0, 5, 2])
    for name in ("c4", "c128", "swa", "c4_tail", "c128_tail"):
        component = layout.component(f"target.{name}")
        (line,) = re.findall(rf"^\| `target\.{name}` \| \d+\.\..*$", TEXT, re.MULTILINE)
        stated = re.findall(r"\((\d+), (\d+)\)", line)
        assert [(int(a), int(b)) for a, b in stated] == [
            (run.first, run.count) for run in span(component, tables, 300)
        ]
        assert f"| {component.rows_per_item} |" in line


def test_the_two_rings_pair_as_written() -> None:
    rings = [
        span(
            layout_of(FLASH, Pod(mode="unified", steps=steps)).component("target.swa_ring"),
            FakeTables(128, slot, [], []),
            300,
        )
        for steps, slot in ((0, 2), (3, 6))
    ]
    for source, target, count in pair_runs(*rings):
        assert f"({source} → {target}, {count})" in TEXT


@pytest.mark.parametrize("mode", ["paged", "unified"])
def test_every_component_is_listed_in_order_with_its_space(mode: str) -> None:
    at = 0
    for component in layout_of(FLASH, Pod(mode=mode)).components:
        at = TEXT.index(f"`{component.name}`", at)
        row = TEXT[TEXT.rindex("\n", 0, at) + 1 : TEXT.index("\n", at)]
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2] == component.coverage.value.replace("_", " ")
        assert cells[3 if mode == "paged" else 4] == component.space.value


def test_every_space_and_coverage_is_explained() -> None:
    assert all(f"| `{space.value}` |" in TEXT for space in Space)
    assert all(f"| {one.value.replace('_', ' ')} |" in TEXT for one in Coverage)
