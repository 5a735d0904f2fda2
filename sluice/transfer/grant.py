"""The two state machines of an attempt: decode's grant and prefill's use of it. Items are freed in SETTLED only.

decode    ISSUED --complete/failed--> SETTLED          every write is known to have ended
          ISSUED --abort--> REVOKING --drained--> SETTLED
          ISSUED/REVOKING --lost--> QUARANTINED --drained/gone--> SETTLED

prefill   RUNNING --complete--> ENDED                  every handle is done
          RUNNING --revoke/fail--> DRAINING --settled--> ENDED
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Generic, TypeVar

from sluice.errors import IllegalTransition

State = TypeVar("State", bound=Enum)
Event = TypeVar("Event", bound=Enum)


class StateMachine(Generic[State, Event]):
    """One current state and the one table of legal moves; anything else raises ``IllegalTransition``."""

    def __init__(self, name: str, start: State, table: Mapping[tuple[State, Event], State]) -> None:
        self._name = name
        self._state = start
        self._table = table

    @property
    def state(self) -> State:
        return self._state

    def can(self, event: Event) -> bool:
        return (self._state, event) in self._table

    def apply(self, event: Event) -> State:
        key = (self._state, event)
        if key not in self._table:
            raise IllegalTransition(
                f"{self._name}: {event.value!r} is not allowed in state {self._state.value!r}"
            )
        self._state = self._table[key]
        return self._state


class GrantState(Enum):
    ISSUED = "issued"
    REVOKING = "revoking"
    QUARANTINED = "quarantined"
    SETTLED = "settled"


class GrantEvent(Enum):
    COMPLETE = "complete"  # prefill said every handle is done
    FAILED = "failed"  # prefill failed and said that nothing more will be written
    ABORT = "abort"  # we asked prefill to stop
    DRAINED = "drained"  # prefill answered that it has stopped
    LOST = "lost"  # no answer, or the stream broke: the peer may still write
    GONE = "gone"  # the writing process is known to have ended


GRANT_TABLE: Mapping[tuple[GrantState, GrantEvent], GrantState] = {
    (GrantState.ISSUED, GrantEvent.COMPLETE): GrantState.SETTLED,
    (GrantState.ISSUED, GrantEvent.FAILED): GrantState.SETTLED,
    (GrantState.ISSUED, GrantEvent.ABORT): GrantState.REVOKING,
    (GrantState.ISSUED, GrantEvent.LOST): GrantState.QUARANTINED,
    # An abort may cross a Complete or a Failed on the wire: both say that writing has ended.
    (GrantState.REVOKING, GrantEvent.COMPLETE): GrantState.SETTLED,
    (GrantState.REVOKING, GrantEvent.FAILED): GrantState.SETTLED,
    (GrantState.REVOKING, GrantEvent.DRAINED): GrantState.SETTLED,
    (GrantState.REVOKING, GrantEvent.LOST): GrantState.QUARANTINED,
    (GrantState.QUARANTINED, GrantEvent.DRAINED): GrantState.SETTLED,
    (GrantState.QUARANTINED, GrantEvent.GONE): GrantState.SETTLED,
}


class AttemptState(Enum):
    RUNNING = "running"  # computing or sending
    DRAINING = "draining"  # posts nothing more, waits for what was posted
    ENDED = "ended"


class AttemptEvent(Enum):
    COMPLETE = "complete"
    REVOKE = "revoke"
    FAIL = "fail"
    SETTLED = "settled"


ATTEMPT_TABLE: Mapping[tuple[AttemptState, AttemptEvent], AttemptState] = {
    (AttemptState.RUNNING, AttemptEvent.COMPLETE): AttemptState.ENDED,
    (AttemptState.RUNNING, AttemptEvent.REVOKE): AttemptState.DRAINING,
    (AttemptState.RUNNING, AttemptEvent.FAIL): AttemptState.DRAINING,
    (AttemptState.DRAINING, AttemptEvent.SETTLED): AttemptState.ENDED,
}


def new_grant(attempt_id: str) -> StateMachine[GrantState, GrantEvent]:
    return StateMachine(f"grant of attempt {attempt_id}", GrantState.ISSUED, GRANT_TABLE)


def new_attempt(attempt_id: str) -> StateMachine[AttemptState, AttemptEvent]:
    return StateMachine(f"attempt {attempt_id}", AttemptState.RUNNING, ATTEMPT_TABLE)
