"""What a new owner finds: zeros or stale bytes in service, NaN or a pattern in debug mode."""

from __future__ import annotations

import pytest
import torch

from sluice.config import PoolConfig, PoolMode
from sluice.errors import ConfigError, PoolError
from sluice.layout.component import Coverage, Kind, Owner, Space
from sluice.layout.span import span
from sluice.pools.base import BufferSpec
from sluice.pools.memory import Memory, build_memory
from sluice.pools.storage import PATTERN_BYTE, Fill
from sluice.types import RequestId
from tests.unit.pools.dsv4_needs import memory

LENGTH = 300
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def bytes_of(state: Memory, component: str, layer_id: int) -> torch.Tensor:
    """uint8 [num_rows, row_bytes]."""
    buffer = state.buffer(component, layer_id)
    return buffer.view(buffer.shape[0], -1).view(torch.uint8)


def owned_rows(state: Memory, component: str, items: list[int]) -> list[int]:
    per_item = state.component(component).rows_per_item
    return [item * per_item + offset for item in items for offset in range(per_item)]


def items_after(state: Memory, dirty: int) -> dict[Space, list[int]]:
    """Scribble over everything, then open and extend one request; its items by space."""
    state.arena().fill_(dirty)
    tables = state.open(RequestId("r"), LENGTH)
    state.extend(tables, LENGTH)
    items = {space: [tables.slot] for space in Space}
    items[Space.PAGE] = list(tables.pages)
    if tables.window_map is not None:
        window_pages = tables.page_table(Space.WINDOW_PAGE)
        items[Space.WINDOW_PAGE] = [page for page in window_pages if page]
    return items


@pytest.mark.parametrize("mode", PoolMode)
def test_nan_fills_exactly_the_new_items(mode: PoolMode) -> None:
    state = memory(mode, fill="nan")
    items = items_after(state, dirty=0)
    for component in state.components():
        owned = set(owned_rows(state, component.name, items[component.space]))
        for entry in component.entries:
            buffer = state.buffer(component.name, entry.layer_id)
            flat = buffer.view(buffer.shape[0], -1).isnan()
            assert {i for i, row in enumerate(flat.tolist()) if all(row)} == owned
            assert {i for i, row in enumerate(flat.tolist()) if any(row)} == owned


@pytest.mark.parametrize("mode", PoolMode)
def test_pattern_fills_exactly_the_new_items(mode: PoolMode) -> None:
    state = memory(mode, fill="pattern")
    items = items_after(state, dirty=0)
    for component in state.components():
        owned = set(owned_rows(state, component.name, items[component.space]))
        for entry in component.entries:
            raw = bytes_of(state, component.name, entry.layer_id)
            assert set(raw.eq(PATTERN_BYTE).all(1).nonzero().flatten().tolist()) == owned
            assert set(raw.ne(0).any(1).nonzero().flatten().tolist()) == owned


@pytest.mark.parametrize("mode", PoolMode)
def test_without_fill_request_state_is_cleared_and_pages_stay_stale(mode: PoolMode) -> None:
    state = memory(mode)
    items = items_after(state, dirty=0x11)
    for component in state.components():
        owned = owned_rows(state, component.name, items[component.space])
        paged = component.space in (Space.PAGE, Space.WINDOW_PAGE)
        for entry in component.entries:
            raw = bytes_of(state, component.name, entry.layer_id)
            assert set(raw[owned].unique().tolist()) == ({0x11} if paged else {0})
            others = [row for row in range(raw.shape[0]) if row not in set(owned)]
            assert set(raw[others].unique().tolist()) == {0x11}


def test_nothing_of_a_request_is_cleared_after_its_tables_are_known() -> None:
    """A later clear would erase what a fast peer has sent already."""
    state = memory(PoolMode.UNIFIED)
    first = state.open(RequestId("a"), LENGTH)
    state.extend(first, LENGTH)
    tail = state.component("target.c128_tail")
    rows = [run.first for run in span(tail, first, LENGTH)]
    state.buffer(tail.name, 3)[rows] = 5.0
    state.extend(first, LENGTH + 2)
    state.open(RequestId("b"), LENGTH)
    assert (state.buffer(tail.name, 3)[rows] == 5.0).all()


def test_only_new_pages_are_filled() -> None:
    state = memory(PoolMode.PAGED, fill="nan")
    tables = state.open(RequestId("r"), LENGTH)
    state.extend(tables, 100)
    state.buffer("target.swa", 0).zero_()
    state.buffer("target.c4", 2).zero_()
    state.extend(tables, 140)
    old, new = tables.pages
    assert not state.buffer("target.c4", 2)[old * 32 : old * 32 + 32].isnan().any()
    assert state.buffer("target.c4", 2)[new * 32 : new * 32 + 32].isnan().all()
    windows = list(tables.page_table(Space.WINDOW_PAGE))
    assert (
        not state.buffer("target.swa", 0)[windows[0] * 128 : windows[0] * 128 + 128].isnan().any()
    )
    assert state.buffer("target.swa", 0)[windows[1] * 128 : windows[1] * 128 + 128].isnan().all()


@pytest.mark.parametrize("dtype", [*FLOATS, "uint8", "int32"])
def test_nan_in_every_dtype(dtype: str) -> None:
    spec = BufferSpec("x", Owner.TARGET, Kind.HIDDEN, Coverage.LAST, 1, 0, (0,), dtype, (3,))
    state = build_memory([spec], PoolConfig(num_slots=2, fill="nan"), 1)
    slot = state.open(RequestId("r"), 1).slot
    row = state.buffer("x", 0)[slot]
    if dtype in FLOATS:
        assert row.to(torch.float64).isnan().all()
    else:
        assert set(bytes_of(state, "x", 0)[slot].tolist()) == {PATTERN_BYTE}


def test_unknown_fills_are_refused() -> None:
    with pytest.raises(ConfigError, match="fill 'zeros' is unknown"):
        memory(PoolMode.PAGED, fill="zeros")
    assert Fill.parse(None) is Fill.NONE


def test_unknown_components_and_layers_are_named() -> None:
    state = memory(PoolMode.PAGED)
    with pytest.raises(PoolError, match=r"no component 'target\.swa_ring'; there are \['target"):
        state.buffer("target.swa_ring", 0)
    with pytest.raises(PoolError, match=r"target\.c4 has no layer 3; it has \[2, 4\]"):
        state.buffer("target.c4", 3)
