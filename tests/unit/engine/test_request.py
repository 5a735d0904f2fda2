"""The transition table, and where new tokens end a request."""

from __future__ import annotations

import itertools

import pytest

from sluice.engine.request import TRANSITIONS, ActiveRequest, Status
from sluice.errors import IllegalTransition
from sluice.types import FinishReason
from tests.unit.engine.toy_model import request


def _active(
    status: Status = Status.QUEUED, stop: tuple[int, ...] = (9,), **sampling: object
) -> ActiveRequest:
    return ActiveRequest(request("r", (1, 2), **sampling), frozenset(stop), status=status)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(Status, Status)))
def test_only_moves_of_the_table_are_possible(before: Status, after: Status) -> None:
    active = _active(before)
    if after in TRANSITIONS[before]:
        active.move(after)
        assert active.status is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.value} -> {after.value}"):
            active.move(after)
        assert active.status is before


def test_every_status_can_end() -> None:
    assert all(TRANSITIONS[s] for s in Status if s is not Status.CLOSED)
    assert not TRANSITIONS[Status.CLOSED]


@pytest.mark.parametrize(
    ("new", "taken", "reason"),
    [
        ((1, 2), (1, 2), None),
        ((1, 9), (1, 9), FinishReason.STOP),
        ((9, 1, 2), (9,), FinishReason.STOP),
        ((1, 2, 3, 4), (1, 2, 3), FinishReason.LENGTH),
        ((1, 2, 9), (1, 2, 9), FinishReason.STOP),
        ((1, 2, 3, 9), (1, 2, 3), FinishReason.LENGTH),
    ],
)
def test_append_cuts_at_the_first_stop_token_or_at_the_limit(
    new: tuple[int, ...], taken: tuple[int, ...], reason: FinishReason | None
) -> None:
    active = _active(max_tokens=3)
    assert active.append(new) == (taken, reason)
    assert tuple(active.output) == taken
