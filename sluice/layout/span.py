"""From a prompt's length to the rows that hold its state, for pools, transfer and explain alike.

Both pods call it with their own tables; the two run lists address the same logical rows in the same
order, which is why they can be paired without either side knowing the other's page numbers, ring
stride or slots.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from sluice.errors import SpanMismatch
from sluice.layout.component import Component, Coverage, Space


@dataclass(frozen=True)
class Run:
    """``count`` consecutive physical rows from ``first``."""

    first: int
    count: int


class Tables(Protocol):
    """Where one request's items are. Page tables are indexed by ``position // page_tokens``."""

    @property
    def page_tokens(self) -> int: ...

    @property
    def slot(self) -> int: ...

    def page_table(self, space: Space) -> Sequence[int]:
        """Page ids in logical order for PAGE or WINDOW_PAGE; 0 where nothing is mapped."""
        ...


def live_ordinals(component: Component, length: int, have: int = 0) -> range:
    """Logical row numbers that hold state for a prompt of ``length`` tokens, receiver already
    having ``have``.

    >>> # c4 entries of a 10-token prompt: two closed rows -> range(0, 2)
    """
    if not 0 <= have <= length:
        raise SpanMismatch(f"{component.name}: prefix of {have} tokens in a prompt of {length}")
    ratio, window = component.tokens_per_row, component.window_tokens
    match component.coverage:
        case Coverage.HISTORY:
            return range(have // ratio, length // ratio)
        case Coverage.WINDOW:
            return range(max(0, length - window), length)
        case Coverage.OVERLAP_TAIL:
            return range(max(0, window * (length // window) - window), length)
        case Coverage.OPEN_BLOCK:
            return range(window * (length // window), length)
        case Coverage.LAST:
            return range(max(0, length - 1), length)


def physical_row(component: Component, tables: Tables, ordinal: int) -> int:
    """Row number of one logical row; the twin for models is ``pools.rows.physical_rows``."""
    per_item = component.rows_per_item
    match component.space:
        case Space.PAGE | Space.WINDOW_PAGE:
            position = ordinal * component.tokens_per_row
            item = tables.page_table(component.space)[position // tables.page_tokens]
            return item * per_item + ordinal % per_item
        case Space.RING_ROW | Space.STATE_ROW:
            return tables.slot * per_item + ordinal % per_item
        case Space.REQUEST_SLOT:
            return tables.slot


def runs_of(component: Component, tables: Tables, ordinals: range) -> tuple[Run, ...]:
    """Physical runs of the given logical rows, in logical order, neighbours merged.

    Raises ``SpanMismatch`` for a row whose item isn't mapped (0 or beyond the page table).
    """
    runs: list[Run] = []
    for start, stop in _within_items(component, tables, ordinals):
        first, count = _mapped_row(component, tables, start), stop - start
        if runs and runs[-1].first + runs[-1].count == first:
            runs[-1] = Run(runs[-1].first, runs[-1].count + count)
        else:
            runs.append(Run(first, count))
    return tuple(runs)


def _mapped_row(component: Component, tables: Tables, ordinal: int) -> int:
    """``physical_row`` of a row that must exist: item 0 is padding, its state is nobody's."""
    try:
        row = physical_row(component, tables, ordinal)
    except IndexError:
        row = 0
    if row < component.rows_per_item:
        raise SpanMismatch(
            f"{component.name}: row {ordinal} (token {ordinal * component.tokens_per_row}) has no "
            f"{component.space.value} item"
        )
    return row


def span(component: Component, tables: Tables, length: int, have: int = 0) -> tuple[Run, ...]:
    """The rows of one component that hold a prompt of ``length`` tokens (see ``Coverage``)."""
    return runs_of(component, tables, live_ordinals(component, length, have))


def _within_items(
    component: Component, tables: Tables, ordinals: range
) -> Iterator[tuple[int, int]]:
    """Cut a logical range where the physical numbering may jump: item ends, ring wraps."""
    per_item = component.rows_per_item
    at = ordinals.start
    while at < ordinals.stop:
        stop = min(ordinals.stop, (at // per_item + 1) * per_item)
        yield at, stop
        at = stop


def count_rows(runs: Sequence[Run]) -> int:
    return sum(run.count for run in runs)


def slice_runs(runs: Sequence[Run], start: int, count: int) -> tuple[Run, ...]:
    """The runs that hold logical rows ``start .. start + count`` of ``runs``."""
    if start < 0 or count < 0 or start + count > count_rows(runs):
        raise SpanMismatch(f"rows {start}..{start + count} of a span of {count_rows(runs)} rows")
    out: list[Run] = []
    skip, left = start, count
    for run in runs:
        if left == 0:
            break
        if skip >= run.count:
            skip -= run.count
            continue
        taken = min(run.count - skip, left)
        out.append(Run(run.first + skip, taken))
        skip, left = 0, left - taken
    return tuple(out)


def pair_runs(source: Sequence[Run], target: Sequence[Run]) -> tuple[tuple[int, int, int], ...]:
    """Match two run lists row by row: ``(source_row, target_row, count)`` triples, contiguous on
    both sides.

    Raises ``SpanMismatch`` when they don't count the same rows; nothing is ever truncated.
    """
    if count_rows(source) != count_rows(target):
        raise SpanMismatch(
            f"source has {count_rows(source)} rows, destination {count_rows(target)}; "
            "both pods must derive the span from the same prompt length and geometry"
        )
    out: list[tuple[int, int, int]] = []
    src, dst = ([run for run in runs if run.count] for runs in (source, target))
    i = j = src_used = dst_used = 0
    while i < len(src):
        count = min(src[i].count - src_used, dst[j].count - dst_used)
        out.append((src[i].first + src_used, dst[j].first + dst_used, count))
        src_used, dst_used = src_used + count, dst_used + count
        if src_used == src[i].count:
            i, src_used = i + 1, 0
        if dst_used == dst[j].count:
            j, dst_used = j + 1, 0
    return tuple(out)
