"""One memory of several pools: order, admission by promises, lifecycle, and the draft rules at build."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sluice.config import PoolConfig, PoolMode
from sluice.errors import GeometryError, Overloaded, PoolError
from sluice.layout.component import Coverage, Kind, Owner, Space
from sluice.pools.base import BufferSpec, Occupancy, RequestTables, StateMemory
from sluice.pools.memory import Memory, build_memory
from sluice.types import RequestId
from tests.unit.pools.dsv4_needs import (
    VERIFY_TOKENS,
    config,
    draft_needs,
    memory,
    needs,
    target_needs,
)


def opened(state: Memory, max_tokens: int = 300, name: str = "r") -> RequestTables:
    return state.open(RequestId(name), max_tokens)


@pytest.mark.parametrize("mode", PoolMode)
def test_components_keep_the_order_of_the_needs(mode: PoolMode) -> None:
    state: StateMemory = memory(mode)  # also: a Memory is a StateMemory
    names = [component.name for component in state.components()]
    assert names == [state.window_name(spec.name) for spec in needs()]
    owners = [component.owner for component in state.components()]
    assert owners == [Owner.TARGET] * 7 + [Owner.DRAFT] * 2, "the draft's components are trailing"
    assert [name for name in names if state.has(name)] == names
    assert state.component(names[3]).coverage is Coverage.WINDOW


@pytest.mark.parametrize("mode", PoolMode)
def test_regions_come_in_component_order_one_an_entry(mode: PoolMode) -> None:
    state = memory(mode)
    expected = [(c.name, e.layer_id) for c in state.components() for e in c.entries]
    assert [(region.component, region.layer_id) for region in state.regions()] == expected


def test_window_names_by_mode() -> None:
    assert memory(PoolMode.PAGED).window_name("draft.swa") == "draft.swa"
    assert memory(PoolMode.UNIFIED).window_name("draft.swa") == "draft.swa_ring"
    assert memory(PoolMode.UNIFIED).window_name("target.c4_tail") == "target.c4_tail"
    assert not memory(PoolMode.UNIFIED).has("draft.swa")
    with pytest.raises(PoolError, match=r"no state 'swa' was declared"):
        memory(PoolMode.PAGED).window_name("swa")


def test_geometry_of_each_owner() -> None:
    state = memory(PoolMode.UNIFIED, num_slots=4)
    assert (state.geometry().ring_rows, state.geometry().ring_capacity) == (19, 95)
    assert state.geometry(Owner.DRAFT).layer_ratios == (0,)
    assert memory(PoolMode.PAGED).geometry().ring_rows == 0


def test_occupancy_by_mode() -> None:
    assert memory(PoolMode.PAGED, num_pages=24, num_window_pages=10).occupancy() == (
        Occupancy(Space.PAGE, 24, 24, 0, 0),
        Occupancy(Space.WINDOW_PAGE, 10, 10, 0, 0),
        Occupancy(Space.REQUEST_SLOT, 4, 4, 0, 0),
    )
    spaces = [one.space for one in memory(PoolMode.UNIFIED).occupancy()]
    assert spaces == [Space.PAGE, Space.REQUEST_SLOT]


@pytest.mark.parametrize("mode", PoolMode)
def test_a_promise_is_kept_for_later(mode: PoolMode) -> None:
    """Admission counts what a request may reach, not what it holds: nobody gets stuck half way."""
    state = memory(mode, num_pages=7)
    first = opened(state, 4 * 128 - VERIFY_TOKENS)  # 4 pages, none taken yet
    assert state.occupancy()[0].held == 0
    assert state.can_open(3 * 128 - VERIFY_TOKENS)
    assert not state.can_open(3 * 128 - VERIFY_TOKENS + 1)
    second = opened(state, 3 * 128 - VERIFY_TOKENS, "s")
    for tables, tokens in ((second, 384), (first, 512)):
        for stop in range(64, tokens + 1, 64):
            state.extend(tables, stop)
            state.advance(tables, stop)
    state.check()


@pytest.mark.parametrize("mode", PoolMode)
def test_full_memory_says_what_is_short_and_keeps_nothing(mode: PoolMode) -> None:
    state = memory(mode, num_pages=4)
    opened(state, 300)
    before = state.occupancy()
    with pytest.raises(Overloaded, match=r"PAGE: needs 3, 3 of 4 promised") as caught:
        opened(state, 300, "s")
    assert caught.value.stage == "admit"
    assert state.occupancy() == before
    state.check()


def test_slots_are_a_capacity_too() -> None:
    state = memory(PoolMode.UNIFIED, num_slots=2)
    slots = [opened(state, 1, name).slot for name in "ab"]
    assert slots == [1, 2], "slot 0 is padding"
    with pytest.raises(Overloaded, match=r"REQUEST_SLOT: needs 1, 2 of 2 promised"):
        opened(state, 1, "c")


def test_window_pages_are_a_capacity_too() -> None:
    state = memory(PoolMode.PAGED, num_window_pages=4)
    opened(state, 900)
    assert not state.can_open(1)
    with pytest.raises(Overloaded, match=r"WINDOW_PAGE: needs 1, 4 of 4 promised"):
        opened(state, 1, "s")


def test_a_window_promise_does_not_grow_with_the_prompt() -> None:
    state = memory(PoolMode.PAGED, num_pages=400, num_window_pages=4)
    assert state.can_open(400 * 128 - VERIFY_TOKENS)


def test_could_ever_open_ignores_who_is_there_now() -> None:
    state = memory(PoolMode.UNIFIED, num_pages=4)
    opened(state, 500)
    assert not state.can_open(500)
    assert state.could_ever_open(4 * 128 - VERIFY_TOKENS)
    assert not state.could_ever_open(4 * 128 - VERIFY_TOKENS + 1)


@pytest.mark.parametrize("mode", PoolMode)
def test_positions_beyond_the_promise_are_refused_before_anything_moves(mode: PoolMode) -> None:
    state = memory(mode)
    tables = opened(state, 100)
    state.extend(tables, 100 + VERIFY_TOKENS)
    before = state.occupancy()
    with pytest.raises(PoolError, match=r"105 positions asked for, 104 promised"):
        state.extend(tables, 101 + VERIFY_TOKENS)
    assert state.occupancy() == before


@pytest.mark.parametrize("mode", PoolMode)
def test_pages_come_in_one_run(mode: PoolMode) -> None:
    state = memory(mode)
    tables = opened(state, 900)
    for stop in (200, 640, 900):
        state.extend(tables, stop)
        state.advance(tables, stop)
    assert tables.pages == list(range(1, 9))


@pytest.mark.parametrize("mode", PoolMode)
def test_a_request_grows_behind_its_last_page(mode: PoolMode) -> None:
    """Not into the lowest hole: neighbouring pages are one copy, and one gather."""
    state = memory(mode)
    leaver, stayer = opened(state, name="a"), opened(state, name="b")
    state.extend(leaver, 128)
    state.extend(stayer, 128)
    state.close(leaver)
    state.extend(stayer, 132)
    assert stayer.pages == [2, 3]
    if mode is PoolMode.PAGED:
        assert list(stayer.page_table(Space.WINDOW_PAGE)) == [2, 3]


@pytest.mark.parametrize("mode", PoolMode)
def test_close_returns_everything_and_empties_the_tables(mode: PoolMode) -> None:
    state = memory(mode)
    tables = opened(state)
    state.extend(tables, 300)
    assert not state.at_baseline()
    state.close(tables)
    assert state.at_baseline()
    assert (tables.slot, tables.pages) == (0, [])
    state.check()


@pytest.mark.parametrize("mode", PoolMode)
def test_a_promise_alone_is_not_baseline(mode: PoolMode) -> None:
    state = memory(mode)
    tables = opened(state)
    assert not state.at_baseline()
    state.close(tables)
    assert state.at_baseline()


@pytest.mark.parametrize("mode", PoolMode)
def test_quarantined_items_are_nobodys_until_closed(mode: PoolMode) -> None:
    state = memory(mode, num_pages=4)
    tables = opened(state, 300)
    state.extend(tables, 200)
    held = [one.held for one in state.occupancy()]
    pages = list(tables.pages)
    state.quarantine(tables)
    assert [one.held for one in state.occupancy()] == [0] * len(held)
    assert [one.quarantined for one in state.occupancy()] == held
    assert tables.pages == pages, "what a peer may write is still known"
    other = opened(state, 200, "s")  # the page that was promised but never taken is free for others
    state.extend(other, 200)
    assert not set(other.pages) & set(pages)
    assert other.slot != tables.slot
    state.check()
    state.close(tables)
    state.close(other)
    assert state.at_baseline()


@pytest.mark.parametrize("mode", PoolMode)
def test_a_quarantined_request_can_only_be_closed(mode: PoolMode) -> None:
    state = memory(mode)
    tables = opened(state)
    state.quarantine(tables)
    with pytest.raises(PoolError, match="quarantined"):
        state.extend(tables, 10)
    with pytest.raises(PoolError, match="quarantined"):
        state.advance(tables, 0)
    with pytest.raises(PoolError, match="quarantined"):
        state.quarantine(tables)
    state.close(tables)
    assert state.at_baseline()


def test_one_request_id_may_be_open_twice_while_its_old_items_are_quarantined() -> None:
    """A retried request keeps its id; its first attempt's items may still be written by a lost peer."""
    state = memory(PoolMode.PAGED)
    first = opened(state)
    state.extend(first, 300, live_from=284)
    state.quarantine(first)
    second = opened(state)
    state.extend(second, 300, live_from=284)
    assert not set(first.pages) & set(second.pages)
    state.close(second)
    state.check()
    state.close(first)
    assert state.at_baseline()


@pytest.mark.parametrize("mode", PoolMode)
def test_tables_of_nobody_are_refused(mode: PoolMode) -> None:
    state = memory(mode)
    tables = opened(state)
    state.close(tables)
    for call in (state.close, state.quarantine):
        with pytest.raises(PoolError, match=r"request r \(slot 0\) is not open"):
            call(tables)
    other = memory(mode)
    mine, theirs = opened(state), opened(other)
    assert mine.slot == theirs.slot
    with pytest.raises(PoolError, match="is not open in this memory"):
        state.extend(theirs, 1)


@pytest.mark.parametrize("mode", PoolMode)
def test_batch_tables_pad_with_zero(mode: PoolMode) -> None:
    state = memory(mode)
    one, two = opened(state), opened(state, name="s")
    state.extend(one, 300, live_from=284)
    state.extend(two, 100)
    batch = state.batch_tables([one, two])
    assert batch.pages_SP.tolist() == [one.pages, [*two.pages, 0, 0]]
    windows = [[0, 0, 1], [2, 0, 0]] if mode is PoolMode.PAGED else [[0, 0, 0], [0, 0, 0]]
    assert batch.window_pages_SP.tolist() == windows
    assert batch.slots_S.tolist() == [one.slot, two.slot]
    assert {t.dtype for t in (batch.pages_SP, batch.window_pages_SP, batch.slots_S)} == {
        torch.int64
    }


def test_batch_tables_of_requests_without_pages() -> None:
    batch = memory(PoolMode.PAGED).batch_tables([])
    assert batch.pages_SP.shape == (0, 0)


def test_check_sees_a_page_that_a_table_lost() -> None:
    state = memory(PoolMode.UNIFIED)
    tables = opened(state)
    state.extend(tables, 300)
    tables.pages.pop()
    with pytest.raises(PoolError, match="PAGE: slot 1 lists items"):
        state.check()


def test_check_sees_a_mapping_changed_behind_its_back() -> None:
    state = memory(PoolMode.PAGED)
    tables = opened(state)
    state.extend(tables, 100)
    assert tables.window_map is not None
    tables.window_map.set(tables.pages[0], 7)
    with pytest.raises(PoolError, match="WINDOW_PAGE: slot 1 lists items"):
        state.check()


def test_check_sees_a_slot_that_leaked() -> None:
    state = memory(PoolMode.UNIFIED)
    opened(state)
    state._open.clear()
    with pytest.raises(PoolError):
        state.check()


def test_all_requests_share_one_map_object() -> None:
    state = memory(PoolMode.PAGED)
    one, two = opened(state), opened(state, name="s")
    assert one.window_map is two.window_map is not None
    assert opened(memory(PoolMode.UNIFIED)).window_map is None


@pytest.mark.parametrize("mode", PoolMode)
def test_build_refuses_a_draft_with_compressed_state(mode: PoolMode) -> None:
    compressed = replace(target_needs()[0], name="draft.c4", owner=Owner.DRAFT, layer_ids=(5,))
    with pytest.raises(GeometryError) as caught:
        build_memory([*needs(), compressed], config(mode), VERIFY_TOKENS)
    message = str(caught.value)
    assert "every draft layer must be window-only" in message
    assert "ratios=[0, 0, 4, 128, 4]" in message
    assert "ratios=[4]" in message


@pytest.mark.parametrize("mode", PoolMode)
def test_build_refuses_a_draft_with_another_window(mode: PoolMode) -> None:
    with pytest.raises(GeometryError, match=r"same window; target: .*window=16.*draft: .*window=8"):
        build_memory([*target_needs(16), *draft_needs(8)], config(mode), VERIFY_TOKENS)


def test_build_refuses_a_draft_before_its_target() -> None:
    with pytest.raises(GeometryError, match="declared before target state"):
        build_memory([*draft_needs(), *target_needs()], config(PoolMode.PAGED), VERIFY_TOKENS)


def test_build_refuses_no_state() -> None:
    with pytest.raises(GeometryError, match="declares no state"):
        build_memory([], config(PoolMode.PAGED), 1)


@pytest.mark.parametrize("mode", PoolMode)
def test_a_target_without_draft_is_fine(mode: PoolMode) -> None:
    state = build_memory(target_needs(), config(mode), 1)
    assert [component.owner for component in state.components()] == [Owner.TARGET] * 7
    assert state.component("target.c128_tail").rows_per_item == 128


@pytest.mark.parametrize("mode", PoolMode)
def test_plain_kv_needs_only_pages(mode: PoolMode) -> None:
    """A Llama-like model: every token's key and value, no window."""
    spec = BufferSpec(
        "target.kv", Owner.TARGET, Kind.KV, Coverage.HISTORY, 1, 0, (0, 1), "float32", (2, 4)
    )
    settings = PoolConfig(mode=mode, page_tokens=16, num_pages=8, num_slots=2)
    state = build_memory([spec], settings, 1)
    tables = opened(state, 100)
    state.extend(tables, 100)
    state.advance(tables, 100)
    assert len(tables.pages) == 7
    state.check()
    state.close(tables)
    assert state.at_baseline()
