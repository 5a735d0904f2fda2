"""Writes of a component: every live byte once, nothing else, refusals by name."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import SluiceError, SpanMismatch, TransferFailed
from sluice.layout.component import Component, Coverage, Entry, Kind, Owner, Space
from sluice.layout.span import Run
from sluice.pools.base import Region
from sluice.transfer.plane import Write
from sluice.transfer.writes import count_bytes, group_writes, plan_writes


def _component(num_items: int = 8, rows_per_item: int = 4, layers: int = 2) -> Component:
    entries = tuple(Entry(layer, "uint8", (3 + layer,), 3 + layer) for layer in range(layers))
    return Component(
        name="target.c4",
        owner=Owner.TARGET,
        kind=Kind.C4,
        space=Space.PAGE,
        coverage=Coverage.HISTORY,
        tokens_per_row=4,
        rows_per_item=rows_per_item,
        window_tokens=0,
        num_items=num_items,
        entries=entries,
    )


def _regions(component: Component, base: int) -> tuple[Region, ...]:
    regions = []
    for entry in component.entries:
        regions.append(
            Region(component.name, entry.layer_id, base, component.num_rows, entry.row_bytes)
        )
        base += component.num_rows * entry.row_bytes + 64
    return tuple(regions)


def _coalesce(rows: list[int]) -> list[Run]:
    runs: list[Run] = []
    for row in rows:
        if runs and runs[-1].first + runs[-1].count == row:
            runs[-1] = Run(runs[-1].first, runs[-1].count + 1)
        else:
            runs.append(Run(row, 1))
    return runs


@st.composite
def _two_sides(draw: st.DrawFn) -> tuple[Component, Component, list[int], list[int]]:
    source = _component(draw(st.integers(2, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 3)))
    target = dataclasses.replace(
        source, num_items=draw(st.integers(2, 6)), rows_per_item=draw(st.integers(1, 5))
    )
    source_rows = draw(st.permutations(range(source.rows_per_item, source.num_rows)))
    target_rows = draw(st.permutations(range(target.rows_per_item, target.num_rows)))
    count = draw(st.integers(0, min(len(source_rows), len(target_rows))))
    return source, target, list(source_rows[:count]), list(target_rows[:count])


@given(_two_sides(), st.integers(1, 40), st.integers(1, 5))
def test_every_live_byte_is_written_once_and_no_other(
    sides: tuple[Component, Component, list[int], list[int]], max_bytes: int, max_writes: int
) -> None:
    source, target, source_rows, target_rows = sides
    source_regions, target_regions = _regions(source, 10_000), _regions(target, 50_000)
    writes = plan_writes(
        source,
        target,
        _coalesce(source_rows),
        _coalesce(target_rows),
        source_regions,
        target_regions,
    )
    groups = group_writes(writes, max_bytes, max_writes)

    moved: dict[int, int] = {}
    for write in (write for group in groups for write in group):
        for offset in range(write.num_bytes):
            assert write.destination + offset not in moved, "a destination byte is written twice"
            moved[write.destination + offset] = write.source + offset

    expected: dict[int, int] = {}
    for entry, here, there in zip(source.entries, source_regions, target_regions, strict=True):
        for source_row, target_row in zip(source_rows, target_rows, strict=True):
            for byte in range(entry.row_bytes):
                expected[there.address + target_row * entry.row_bytes + byte] = (
                    here.address + source_row * entry.row_bytes + byte
                )
    assert moved == expected
    assert all(count_bytes(group) <= max_bytes and len(group) <= max_writes for group in groups)


def test_consecutive_rows_become_one_write_per_entry() -> None:
    component = _component()
    writes = plan_writes(
        component,
        component,
        [Run(4, 8)],
        [Run(12, 8)],
        _regions(component, 1000),
        _regions(component, 9000),
    )
    assert [write.num_bytes for write in writes] == [8 * 3, 8 * 4]


def test_groups_fill_up() -> None:
    groups = group_writes([Write(100, 200, 10)] * 7, max_bytes=25, max_writes=100)
    assert [len(group) for group in groups] == [2, 2, 2, 1]


def test_group_limits_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        group_writes([], max_bytes=0)


_GOOD = [Run(4, 4)]


@pytest.mark.parametrize(
    ("source_runs", "target_runs", "error", "says"),
    [
        ([Run(4, 3)], _GOOD, SpanMismatch, "source has 3 rows, destination 4"),
        ([Run(0, 4)], _GOOD, TransferFailed, "source rows 0..4"),
        ([Run(3, 4)], _GOOD, TransferFailed, "padding"),
        (_GOOD, [Run(2, 4)], TransferFailed, "destination rows 2..6"),
        (_GOOD, [Run(29, 4)], TransferFailed, "destination rows 29..33"),
        ([Run(29, 4)], _GOOD, TransferFailed, "source rows 29..33"),
        (_GOOD, [Run(-4, 4)], TransferFailed, "destination rows -4..0"),
        (_GOOD, [Run(4, 2), Run(5, 2)], TransferFailed, "row 5 appears twice"),
        (_GOOD, [Run(4, 4), Run(8, 0)], TransferFailed, "rows 8..8"),
    ],
)
def test_bad_runs_are_refused(
    source_runs: list[Run], target_runs: list[Run], error: type[SluiceError], says: str
) -> None:
    component = _component()
    regions = _regions(component, 1000), _regions(component, 9000)
    with pytest.raises(error, match=says):
        plan_writes(component, component, source_runs, target_runs, *regions)


def test_a_peer_with_fewer_rows_than_its_layout_says_is_refused() -> None:
    component = _component()
    smaller = _component(num_items=3)
    with pytest.raises(TransferFailed, match=r"not inside 4\.\.12"):
        plan_writes(
            component,
            component,
            [Run(4, 4)],
            [Run(9, 4)],
            _regions(component, 1000),
            _regions(smaller, 9000),
        )


def test_other_row_size_names_all_three() -> None:
    component = _component()
    wider = [dataclasses.replace(r, row_bytes=99) for r in _regions(component, 9000)]
    with pytest.raises(SpanMismatch, match=r"layer 0: a row is 3 bytes.*3 at the source, 99"):
        plan_writes(component, component, _GOOD, _GOOD, _regions(component, 1000), wider)


def test_missing_doubled_or_foreign_entries_are_refused() -> None:
    component = _component()
    here, there = _regions(component, 1000), _regions(component, 9000)
    with pytest.raises(SpanMismatch, match=r"destination \[0\]"):
        plan_writes(component, component, _GOOD, _GOOD, here, there[:1])
    with pytest.raises(TransferFailed, match="layer 1 twice"):
        plan_writes(component, component, _GOOD, _GOOD, here, (*there, there[1]))
    other = dataclasses.replace(component, name="draft.swa")
    with pytest.raises(SpanMismatch, match=r"target\.c4 paired with draft\.swa"):
        plan_writes(component, other, _GOOD, _GOOD, here, there)
