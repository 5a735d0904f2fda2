"""Spans against a naive implementation that looks every row up by itself, for every boundary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.errors import SpanMismatch
from sluice.layout.component import Component, Coverage, Space
from sluice.layout.span import (
    Run,
    count_rows,
    live_ordinals,
    pair_runs,
    physical_row,
    runs_of,
    slice_runs,
    span,
)
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of

BOUNDARIES = (4, 8, 128, 256)
LENGTHS = sorted(
    {length for b in BOUNDARIES for length in range(b - 4, b + 6)} | {*range(10), 512, 513, 1000}
)
COMPONENTS = [
    pytest.param(component, pod, id=f"{pod.mode}-{component.name}")
    for pod in (Pod(mode="paged"), Pod(mode="unified"), Pod(mode="paged", page_tokens=256))
    for component in layout_of(SMALL, pod).components
]


@dataclass(frozen=True)
class FakeTables:
    """Page ids in an order that jumps about; window pages only where the tail needs them."""

    page_tokens: int
    slot: int
    pages: Sequence[int]
    window_pages: Sequence[int]

    def page_table(self, space: Space) -> Sequence[int]:
        return self.pages if space is Space.PAGE else self.window_pages


def tables_for(length: int, page_tokens: int = 128, seed: int = 1) -> FakeTables:
    count = -(-length // page_tokens) + 1
    first_live = max(0, length - 128) // page_tokens
    return FakeTables(
        page_tokens=page_tokens,
        slot=seed + 2,
        pages=[1 + (i * 7 + seed) % 61 for i in range(count)],
        window_pages=[0 if i < first_live else 1 + (i * 5 + seed) % 31 for i in range(count)],
    )


def rows_of(runs: Sequence[Run]) -> list[int]:
    return [row for run in runs for row in range(run.first, run.first + run.count)]


def live_tokens(component: Component, length: int, have: int) -> list[int]:
    """First token of every live row, straight from what each kind of state is for."""
    ratio, window = component.tokens_per_row, component.window_tokens
    tokens = range(length)
    match component.coverage:
        case Coverage.HISTORY:  # blocks that are closed and that the receiver does not have
            starts = [t for t in tokens if t % ratio == 0]
            return [t for t in starts if t + ratio <= length and t // ratio >= have // ratio]
        case Coverage.WINDOW:  # what the query at length - 1 saw
            return [t for t in tokens if t > length - 1 - window]
        case Coverage.OVERLAP_TAIL:  # the open block and the one before it
            return [t for t in tokens if t // window >= length // window - 1]
        case Coverage.OPEN_BLOCK:
            return [t for t in tokens if t // window == length // window]
        case Coverage.LAST:
            return [t for t in tokens if t == length - 1]


def naive_row(component: Component, tables: FakeTables, token: int) -> int:
    """Row of the state that starts at ``token``: find the item, then count rows inside it."""
    rows = component.rows_per_item
    if component.space is Space.REQUEST_SLOT:
        return tables.slot
    if component.space in (Space.RING_ROW, Space.STATE_ROW):
        return tables.slot * rows + token % rows
    page, offset = divmod(token, tables.page_tokens)
    table = tables.pages if component.space is Space.PAGE else tables.window_pages
    return table[page] * rows + offset // component.tokens_per_row % rows


@pytest.mark.parametrize(("component", "pod"), COMPONENTS)
def test_a_span_is_the_rows_a_naive_look_up_finds(component: Component, pod: Pod) -> None:
    for length in LENGTHS:
        tables = tables_for(length, pod.page_tokens)
        for have in {0, length // 2, length // 128 * 128, length}:
            expected = [
                naive_row(component, tables, token)
                for token in live_tokens(component, length, have)
            ]
            assert rows_of(span(component, tables, length, have)) == expected, (length, have)


@pytest.mark.parametrize(("component", "pod"), COMPONENTS)
def test_live_rows_never_share_a_physical_row(component: Component, pod: Pod) -> None:
    for length in LENGTHS:
        rows = rows_of(span(component, tables_for(length, pod.page_tokens), length))
        assert len(set(rows)) == len(rows)


@pytest.mark.parametrize(("component", "pod"), COMPONENTS)
def test_runs_are_merged_where_rows_follow_one_another(component: Component, pod: Pod) -> None:
    for length in LENGTHS:
        runs = span(component, tables_for(length, pod.page_tokens), length)
        assert all(run.count > 0 for run in runs)
        assert all(a.first + a.count != b.first for a, b in pairwise(runs))


@pytest.mark.parametrize(("component", "pod"), COMPONENTS)
def test_chunks_of_a_prompt_add_up_to_its_span(component: Component, pod: Pod) -> None:
    """What chunked sending relies on: history rows of successive chunks are the rows of the whole."""
    if component.coverage is not Coverage.HISTORY:
        return
    length, tables = 1000, tables_for(1000, pod.page_tokens)
    for chunk in (1, 3, 100, 128, 999):
        rows: list[int] = []
        for start in range(0, length, chunk):
            stop = min(start + chunk, length)
            rows += rows_of(runs_of(component, tables, live_ordinals(component, stop, start)))
        assert rows == rows_of(span(component, tables, length))


def test_both_pods_count_the_same_rows_whatever_their_strides() -> None:
    short, long = (
        layout_of(SMALL, Pod(mode="unified")),
        layout_of(SMALL, Pod("p", "unified", steps=7)),
    )
    for length in LENGTHS:
        for ours, theirs in zip(short.components, long.components, strict=True):
            source = span(ours, tables_for(length, seed=1), length)
            target = span(theirs, tables_for(length, seed=9), length)
            for from_row, to_row, count in pair_runs(source, target):
                assert count > 0
                assert from_row in rows_of(source)
                assert to_row in rows_of(target)


def test_a_last_row_exists_from_the_first_token_on() -> None:
    hidden = layout_of(SMALL, Pod()).component("draft.hidden")
    assert span(hidden, tables_for(0), 0) == ()
    assert span(hidden, tables_for(1), 1) == (Run(3, 1),)


@pytest.mark.parametrize("have", [-1, 11])
def test_a_prefix_outside_the_prompt_is_refused(have: int) -> None:
    with pytest.raises(SpanMismatch, match="prefix of"):
        live_ordinals(layout_of(SMALL, Pod()).components[0], 10, have)


@pytest.mark.parametrize("pages", [[1, 0], [1]])
def test_an_unmapped_page_is_an_error_and_never_the_padding_page(pages: list[int]) -> None:
    c4 = layout_of(SMALL, Pod()).component("target.c4")
    with pytest.raises(SpanMismatch, match=r"target\.c4: row 32 \(token 128\) has no PAGE item"):
        span(c4, FakeTables(128, 1, pages, []), 200)


def test_slot_0_is_padding_too() -> None:
    with pytest.raises(SpanMismatch, match="has no REQUEST_SLOT item"):
        span(layout_of(SMALL, Pod()).component("draft.hidden"), FakeTables(128, 0, [], []), 1)


def test_physical_row_of_a_tail_wraps_inside_its_page() -> None:
    tail = layout_of(SMALL, Pod()).component("target.c4_tail")
    tables = FakeTables(128, 1, [], [5, 9])
    assert tail.rows_per_item == 16
    assert [physical_row(tail, tables, t) for t in (0, 15, 16, 127, 128)] == [80, 95, 80, 95, 144]


runs_strategy = st.lists(
    st.builds(Run, st.integers(0, 1000), st.integers(1, 9)), min_size=0, max_size=12
)


@given(runs_strategy, st.data())
def test_a_slice_is_the_slice_of_the_rows(runs: list[Run], data: st.DataObject) -> None:
    total = count_rows(runs)
    start = data.draw(st.integers(0, total))
    count = data.draw(st.integers(0, total - start))
    assert rows_of(slice_runs(runs, start, count)) == rows_of(runs)[start : start + count]


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, 6), (5, 1), (2, -1)])
def test_a_slice_beyond_the_rows_is_refused(start: int, count: int) -> None:
    with pytest.raises(SpanMismatch, match="of a span of 5 rows"):
        slice_runs([Run(1, 2), Run(9, 3)], start, count)


@given(runs_strategy, st.data())
def test_pairing_matches_row_by_row(source: list[Run], data: st.DataObject) -> None:
    """The other side holds the same number of rows, cut anywhere and with empty runs in between."""
    total = count_rows(source)
    cuts = sorted(data.draw(st.lists(st.integers(0, total), max_size=12)))
    counts = [stop - start for start, stop in pairwise([0, *cuts, total])]
    target = [Run(i * 1000, count) for i, count in enumerate(counts)]
    pairs = pair_runs(source, target)
    assert [s + i for s, _, n in pairs for i in range(n)] == rows_of(source)
    assert [t + i for _, t, n in pairs for i in range(n)] == rows_of(target)
    assert all(count > 0 for *_, count in pairs)


@given(runs_strategy, runs_strategy)
def test_unequal_spans_are_never_truncated(source: list[Run], target: list[Run]) -> None:
    if count_rows(source) == count_rows(target):
        return
    with pytest.raises(SpanMismatch, match=f"source has {count_rows(source)} rows"):
        pair_runs(source, target)
