"""The two state machines of an attempt: every legal move, and no other."""

from __future__ import annotations

import itertools
from enum import Enum

import pytest

from sluice.errors import IllegalTransition
from sluice.transfer.grant import (
    ATTEMPT_TABLE,
    GRANT_TABLE,
    AttemptEvent,
    AttemptState,
    GrantEvent,
    GrantState,
    StateMachine,
    new_attempt,
    new_grant,
)

SETTLING = {
    GrantEvent.COMPLETE,
    GrantEvent.FAILED,
    GrantEvent.DRAINED,
    GrantEvent.GONE,
}


@pytest.mark.parametrize(
    ("state", "event"),
    list(itertools.product(GrantState, GrantEvent)),
    ids=lambda value: value.value,
)
def test_grant_moves_only_along_its_table(state: GrantState, event: GrantEvent) -> None:
    _check_move(StateMachine("grant", state, GRANT_TABLE), state, event)


@pytest.mark.parametrize(
    ("state", "event"),
    list(itertools.product(AttemptState, AttemptEvent)),
    ids=lambda value: value.value,
)
def test_attempt_moves_only_along_its_table(state: AttemptState, event: AttemptEvent) -> None:
    _check_move(StateMachine("attempt", state, ATTEMPT_TABLE), state, event)


def _check_move(machine: StateMachine[Enum, Enum], state: Enum, event: Enum) -> None:  # type: ignore[type-var]
    table = GRANT_TABLE if isinstance(state, GrantState) else ATTEMPT_TABLE
    target = table.get((state, event))  # type: ignore[call-overload]
    assert machine.can(event) == (target is not None)
    if target is None:
        with pytest.raises(IllegalTransition, match=f"{event.value}.*{state.value}"):
            machine.apply(event)
        assert machine.state is state
    else:
        assert machine.apply(event) is machine.state is target


def test_rows_are_free_only_after_a_word_that_writing_has_ended() -> None:
    """Every way into SETTLED is news from or about the writer; losing it is none."""
    ways_in = {event for (_, event), target in GRANT_TABLE.items() if target is GrantState.SETTLED}
    assert ways_in == SETTLING
    assert not any(source is GrantState.SETTLED for source, _ in GRANT_TABLE)


def test_a_lost_writer_is_quarantined_from_wherever_it_was() -> None:
    for events in ([], [GrantEvent.ABORT]):
        grant = new_grant("a")
        for event in events:
            grant.apply(event)
        assert grant.apply(GrantEvent.LOST) is GrantState.QUARANTINED
        with pytest.raises(IllegalTransition):
            grant.apply(GrantEvent.COMPLETE)  # too late: nobody may adopt these rows


def test_a_revoked_attempt_can_no_longer_complete() -> None:
    attempt = new_attempt("a")
    attempt.apply(AttemptEvent.REVOKE)
    with pytest.raises(IllegalTransition):
        attempt.apply(AttemptEvent.COMPLETE)
    assert attempt.apply(AttemptEvent.SETTLED) is AttemptState.ENDED
