"""Random lives of many requests in every family's memory: every row still read holds what was written,
and nothing leaks.

A model run is imitated: each forward writes, into every component, a number that names the request
and the logical row. After each step every live row of every open request must still hold its number,
which an aliased, freed or overwritten row would not.
"""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sluice.errors import Overloaded
from sluice.layout.component import Component, Coverage, Space
from sluice.layout.span import live_ordinals
from sluice.pools.backup import StateBackup, back_up, restore
from sluice.pools.base import RequestTables
from sluice.types import RequestId
from tests.unit.pools.dsv4_needs import physical
from tests.unit.pools.family_memories import (
    FAMILIES,
    PAGE_TOKENS,
    FamilyMemory,
    mark_rows,
    read_marks,
)

MAX_TOKENS = 700


def mark(number: int, ordinal: int) -> int:
    """Neighbours differ, requests differ, and 0, which fresh memory holds, is nobody's."""
    return (number * 29 + ordinal * 7) % 251 + 1


@dataclass
class Life:
    """One request as the test believes it to be."""

    number: int
    tables: RequestTables
    max_tokens: int
    committed: int = 0
    quarantined: bool = False
    backup: StateBackup | None = None  # while retracted


class MemoryMachine(RuleBasedStateMachine):
    lives = Bundle("lives")

    def __init__(self, family: FamilyMemory) -> None:
        super().__init__()
        self.memory, self.verify_tokens = family.build()
        self.window = max(one.window_tokens for one in self.memory.components())
        self.open: list[Life] = []
        self.count = 0

    @rule(target=lives, max_tokens=st.integers(1, MAX_TOKENS))
    def arrive(self, max_tokens: int) -> Life:
        self.count += 1
        request_id = RequestId(f"r{self.count % 2}")  # ids repeat: accounts are by slot
        life = Life(self.count, RequestTables(request_id, PAGE_TOKENS, 0), max_tokens)
        if not self.memory.can_open(max_tokens):
            with pytest.raises(Overloaded):
                self.memory.open(request_id, max_tokens)
            return life
        life.tables = self.memory.open(request_id, max_tokens)
        self.open.append(life)
        return life

    @rule(life=lives, chunk=st.integers(1, 400))
    def prefill(self, life: Life, chunk: int) -> None:
        stop = min(life.committed + chunk, life.max_tokens)
        if self.runs(life) and stop > life.committed:
            self.memory.extend(life.tables, stop, live_from=max(0, stop - self.window))
            self.write(life, life.committed, stop, lowest_commit=stop)
            self.commit(life, stop)

    @rule(life=lives, drafts=st.integers(0, 5), accepted=st.integers(0, 5))
    def decode(self, life: Life, drafts: int, accepted: int) -> None:
        if not self.runs(life) or not 0 < life.committed < life.max_tokens:
            return
        drafts = min(drafts, self.verify_tokens - 1)
        stop = life.committed + 1 + drafts
        self.memory.extend(life.tables, stop)
        lowest = max(life.committed, stop - self.verify_tokens + 1)
        self.write(life, life.committed, stop, lowest_commit=lowest)
        self.commit(life, min(life.committed + 1 + min(accepted, drafts), life.max_tokens))

    @rule(life=lives, length=st.integers(1, MAX_TOKENS))
    def receive(self, life: Life, length: int) -> None:
        """A decode pod maps only the tail, and a peer writes exactly the live rows."""
        if self.runs(life) and life.committed == 0 and length <= life.max_tokens:
            self.memory.extend(life.tables, length, live_from=max(0, length - self.window))
            for component in self.memory.components():
                self.put(life, component, live_ordinals(component, length))
            life.committed = life.tables.kv_len = length

    @rule(life=lives)
    def retract(self, life: Life) -> None:
        """Under memory pressure: to the host, and everything else given back."""
        if self.runs(life) and life.committed > 0:
            life.backup = back_up(self.memory, life.tables)
            self.memory.close(life.tables)
            self.open.remove(life)

    @rule(life=lives)
    def come_back(self, life: Life) -> None:
        if life.backup is None or not self.memory.can_open(life.max_tokens):
            return
        life.tables = self.memory.open(life.tables.request_id, life.max_tokens)
        self.open.append(life)
        live_from = max(0, life.committed - self.window)
        self.memory.extend(life.tables, life.committed, live_from=live_from)
        restore(self.memory, life.backup, life.tables)
        life.backup = None
        assert life.tables.kv_len == life.committed

    @rule(life=lives)
    def quarantine(self, life: Life) -> None:
        if self.runs(life):
            self.memory.quarantine(life.tables)
            life.quarantined = True

    @rule(life=consumes(lives))
    def leave(self, life: Life) -> None:
        if life in self.open:
            self.memory.close(life.tables)
            self.open.remove(life)

    @precondition(lambda self: not self.open)
    @rule()
    def idle_is_baseline(self) -> None:
        assert self.memory.at_baseline()

    @invariant()
    def books_balance(self) -> None:
        self.memory.check()
        for one in self.memory.occupancy():
            assert one.free + one.held + one.quarantined + one.cached == one.total

    @invariant()
    def nothing_is_owned_twice(self) -> None:
        slots = [life.tables.slot for life in self.open]
        pages = [page for life in self.open for page in life.tables.pages]
        owned = [slots, pages]
        if any(one.space is Space.WINDOW_PAGE for one in self.memory.components()):
            owned.append(
                [
                    page
                    for life in self.open
                    for page in life.tables.page_table(Space.WINDOW_PAGE)
                    if page
                ]
            )
        for items in owned:
            assert 0 not in items
            assert len(set(items)) == len(items)

    @invariant()
    def live_rows_hold_what_was_written(self) -> None:
        for life in self.open:
            for component in self.memory.components():
                ordinals = live_ordinals(component, life.committed)
                rows = physical(component, life.tables, ordinals)
                expected = [mark(life.number, ordinal) for ordinal in ordinals]
                for values in read_marks(self.memory, component, rows):
                    assert values == expected, f"{component.name} of request {life.number}"

    def teardown(self) -> None:
        for life in self.open:
            self.memory.close(life.tables)
        assert self.memory.at_baseline()
        self.memory.check()

    def runs(self, life: Life) -> bool:
        return life in self.open and not life.quarantined

    def write(self, life: Life, start: int, stop: int, lowest_commit: int) -> None:
        """What a forward over positions start..stop stores: rows some later commit can read."""
        for component in self.memory.components():
            if component.coverage is Coverage.LAST:
                continue
            ratio = component.tokens_per_row
            first = start // ratio
            if component.coverage is not Coverage.HISTORY:
                first = max(first, live_ordinals(component, lowest_commit).start)
            self.put(life, component, range(first, stop // ratio))

    def commit(self, life: Life, committed: int) -> None:
        for component in self.memory.components():
            if component.coverage is Coverage.LAST:
                self.put(life, component, live_ordinals(component, committed))
        life.committed = life.tables.kv_len = committed
        self.memory.advance(life.tables, committed)

    def put(self, life: Life, component: Component, ordinals: range) -> None:
        rows = physical(component, life.tables, ordinals)
        assert len(set(rows)) == len(rows), f"{component.name}: one row for two tokens"
        mark_rows(
            self.memory, component, rows, [mark(life.number, ordinal) for ordinal in ordinals]
        )


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_random_lives(family: FamilyMemory) -> None:
    run_state_machine_as_test(
        lambda: MemoryMachine(family),
        settings=settings(max_examples=30, stateful_step_count=40, deadline=None),
    )
