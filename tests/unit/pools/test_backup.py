"""A backup brings every live row back, byte for byte, or says what it lacks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from sluice.config import PoolConfig, PoolMode
from sluice.errors import ConfigError, PoolError
from sluice.layout.span import span
from sluice.pools.backup import StateBackup, back_up, backup_bytes, check_backup, restore
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.pools.slots import SlotPool
from sluice.types import RequestId
from tests.unit.pools.dsv4_needs import WINDOW, memory
from tests.unit.pools.family_memories import FamilyMemory

MODES = list(PoolMode)
LENGTHS = (1, 3, 4, 5, 16, 17, 127, 128, 129, 300)


def _opened(made: Memory, length: int) -> RequestTables:
    tables = made.open(RequestId("r"), 400)
    made.extend(tables, length, live_from=max(0, length - WINDOW))
    tables.kv_len = length
    return tables


def _scramble(made: Memory) -> None:
    """Random bytes everywhere, NaNs of every payload among them."""
    generator = torch.Generator().manual_seed(5)
    arena = made.arena()
    arena.copy_(torch.randint(0, 256, arena.shape, dtype=torch.uint8, generator=generator))


def _live_bytes(
    made: Memory, tables: RequestTables, length: int
) -> dict[tuple[str, int], list[int]]:
    found = {}
    for component in made.components():
        rows = [
            r
            for run in span(component, tables, length)
            for r in range(run.first, run.first + run.count)
        ]
        for entry in component.entries:
            buffer = made.buffer(component.name, entry.layer_id)
            raw = buffer.view(len(buffer), -1).view(torch.uint8)[rows]
            found[component.name, entry.layer_id] = raw.flatten().tolist()
    return found


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_live_byte_comes_back_in_other_items(mode: PoolMode, length: int) -> None:
    made = memory(mode, fill="nan")
    tables = _opened(made, length)
    tables.draft_valid_from = 7
    _scramble(made)
    before, items = _live_bytes(made, tables, length), (tables.slot, list(tables.pages))
    backup = back_up(made, tables)
    assert backup.num_bytes == sum(len(values) for values in before.values()) > 0
    made.close(tables)
    squatter = _opened(made, 200)  # so that other items are taken
    again = _opened(made, length)
    again.kv_len = 0
    restore(made, backup, again)
    assert (again.slot, again.pages) != items
    assert (again.kv_len, again.draft_valid_from) == (length, 7)
    assert _live_bytes(made, again, length) == before
    made.close(again)
    made.close(squatter)
    assert made.at_baseline()


def _without(backup: StateBackup, name: str) -> StateBackup:
    return replace(backup, components=tuple(c for c in backup.components if c.name != name))


@pytest.mark.parametrize("mode", MODES)
def test_a_backup_without_some_component_is_refused_by_name(mode: PoolMode) -> None:
    made = memory(mode)
    tables = _opened(made, 30)
    backup = back_up(made, tables)
    tables.kv_len = 0
    assert [c.name for c in backup.components] == [c.name for c in made.components()]
    for component in backup.components:
        with pytest.raises(PoolError, match="the backup has components"):
            restore(made, _without(backup, component.name), tables)


def test_a_backup_that_counts_other_rows_or_layers_is_refused() -> None:
    made = memory(PoolMode.PAGED)
    tables = _opened(made, 30)
    backup = back_up(made, tables)
    with pytest.raises(PoolError, match=r"a backup of tokens 0\.\.30 follows 30 tokens"):
        restore(made, backup, tables)
    tables.kv_len = 0
    with pytest.raises(PoolError, match=r"target\.c4 layer 2: the backup is \(7, 12\) bytes"):
        restore(made, replace(backup, length=29 + 3), tables)
    first = backup.components[0]
    short = replace(first, layers=first.layers[:1], rows=first.rows[:1])
    with pytest.raises(PoolError, match=r"target\.c4: the backup has layers"):
        restore(made, replace(backup, components=(short, *backup.components[1:])), tables)


def test_state_outside_rows_is_refused_at_start_up(monkeypatch: pytest.MonkeyPatch) -> None:
    made = memory(PoolMode.UNIFIED)
    check_backup(made)
    monkeypatch.setattr(SlotPool, "whole_in_rows", False)
    with pytest.raises(ConfigError, match=r"draft\.hidden: the pool keeps state outside its rows"):
        check_backup(made)


@pytest.mark.parametrize("mode", MODES)
def test_a_promise_grows_where_there_is_room_and_not_at_all_elsewhere(mode: PoolMode) -> None:
    made = memory(mode, num_pages=4, num_window_pages=8)
    one, other = made.open(RequestId("a"), 100), made.open(RequestId("b"), 100)
    with pytest.raises(PoolError, match="104 promised"):
        made.extend(one, 105)
    assert made.grow(one, 130)
    assert made.grow(one, 90), "a promise that is large enough stays"
    made.extend(one, 134)
    assert not made.grow(other, 300)
    with pytest.raises(PoolError, match="104 promised"):
        made.extend(other, 105)
    made.check()
    made.close(one)
    assert made.grow(other, 300)
    made.close(other)
    assert made.at_baseline()


@pytest.mark.parametrize("length", [1, 5, 8, 9, 31])
def test_the_estimate_of_a_dealt_history_is_the_largest_ranks_copy(length: int) -> None:
    """The same on all ranks: they retract, or refuse to, alike."""
    needs, verify_tokens = FamilyMemory("tiny-kimi", draft=True).needs()
    copied, estimated = [], set()
    for rank in range(4):
        config = PoolConfig(page_tokens=4, num_pages=30, num_slots=2, context=4, context_rank=rank)
        made = build_memory(needs, config, verify_tokens)
        tables = _opened(made, length)
        estimated.add(backup_bytes(made, length))
        backup = back_up(made, tables)
        estimated.add(backup.num_bytes)
        copied.append(sum(rows.numel() for one in backup.components for rows in one.rows))
    assert estimated == {max(copied)}
    assert (min(copied) < max(copied)) == (length % 4 > 0)
