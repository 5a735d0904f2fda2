"""The vectorised row arithmetic gives exactly the rows of ``layout.span``."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.config import PoolMode
from sluice.layout.component import Space
from sluice.layout.span import physical_row
from sluice.pools.base import BatchTables, RequestTables, WindowMap
from sluice.pools.rows import physical_rows
from sluice.pools.specs import components_of
from sluice.types import RequestId
from tests.unit.pools.dsv4_needs import PAGE_TOKENS, VERIFY_TOKENS, config, memory, needs

SPACES = {
    PoolMode.PAGED: {Space.PAGE, Space.WINDOW_PAGE, Space.STATE_ROW, Space.REQUEST_SLOT},
    PoolMode.UNIFIED: {Space.PAGE, Space.RING_ROW, Space.STATE_ROW, Space.REQUEST_SLOT},
}


@st.composite
def random_tables(draw: st.DrawFn, mode: PoolMode) -> tuple[list[RequestTables], BatchTables]:
    """Two or three requests with any page ids, window pages and slots."""
    pages = draw(st.permutations(range(1, 13)))
    window_pages = draw(st.permutations(range(1, 13)))
    slots = draw(st.permutations(range(1, 5)))
    window_map = WindowMap(13)
    for page, window_page in zip(pages, window_pages, strict=True):
        window_map.set(page, window_page)
    counts = draw(st.lists(st.integers(1, 4), min_size=2, max_size=3))
    requests, at = [], 0
    for index, count in enumerate(counts):
        shared = window_map if mode is PoolMode.PAGED else None
        tables = RequestTables(
            RequestId(f"r{index}"),
            PAGE_TOKENS,
            slots[index],
            list(pages[at : at + count]),
            shared,
        )
        requests.append(tables)
        at += count
    return requests, memory(mode).batch_tables(requests)


@pytest.mark.parametrize("mode", PoolMode)
@settings(max_examples=30)
@given(data=st.data())
def test_rows_equal_the_spans_rows(mode: PoolMode, data: st.DataObject) -> None:
    requests, batch = data.draw(random_tables(mode))
    components = components_of(needs(), config(mode), VERIFY_TOKENS)
    assert {component.space for component in components} == SPACES[mode]
    for component in components:
        pairs = [
            (index, ordinal)
            for index, tables in enumerate(requests)
            for ordinal in data.draw(
                st.lists(
                    st.integers(0, len(tables.pages) * PAGE_TOKENS // component.tokens_per_row - 1),
                    min_size=1,
                    max_size=6,
                )
            )
        ]
        segments = torch.tensor([index for index, _ in pairs])
        ordinals = torch.tensor([ordinal for _, ordinal in pairs])
        expected = [physical_row(component, requests[i], ordinal) for i, ordinal in pairs]
        rows = physical_rows(component, batch, segments, ordinals)
        assert rows.tolist() == expected, component.name
        assert rows.dtype == torch.int64


@pytest.mark.parametrize("mode", PoolMode)
def test_segments_and_ordinals_broadcast(mode: PoolMode) -> None:
    state = memory(mode)
    requests = [state.open(RequestId(f"r{index}"), 300) for index in range(2)]
    for tables in requests:
        state.extend(tables, 300)
    batch = state.batch_tables(requests)
    segments, ordinals = torch.tensor([[0], [1]]), torch.arange(284, 300)
    for component in state.components():
        at = ordinals // component.tokens_per_row
        rows = physical_rows(component, batch, segments, at)
        assert rows.shape == (2, 16), component.name
        for index, tables in enumerate(requests):
            expected = [physical_row(component, tables, ordinal) for ordinal in at.tolist()]
            assert rows[index].tolist() == expected
