"""Backups of retracted requests take no more host memory than allowed, and never hold damaged state."""

from __future__ import annotations

import functools

import pytest

from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine import scheduler
from sluice.engine.core import EngineCore
from sluice.engine.request import Status
from sluice.errors import InternalError, Overloaded
from sluice.models.kimi_linear.state import UNSETTLED
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory
from sluice.types import Request, RequestId
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import prompt_of, request, toy_core
from tests.unit.engine.toy_recurrent import RecurrentToy, Slots, recurrent_core

NAMES = tuple(RequestId(name) for name in "abcd")


def _requests() -> list[Request]:
    return [
        request(name, prompt_of(9, number), max_tokens=40, seed=number, temperature=0.8)
        for number, name in enumerate(NAMES)
    ]


def _core(backup_bytes: int) -> EngineCore:
    """Five pages for four requests that need four each."""
    pool = PoolConfig(
        mode=PoolMode.PAGED,
        page_tokens=16,
        num_pages=5,
        num_window_pages=12,
        num_slots=6,
        fill="nan",
    )
    config = EngineConfig(promised_output=0.0, backup_bytes=backup_bytes)
    return toy_core(target=RecurrentToy(), pool=pool, config=config)


@functools.cache
def _alone() -> dict[RequestId, Story]:
    core, stories = _core(1 << 20), {}
    for one in _requests():
        stories |= run_all(core, [one])
    return stories


def _run(core: EngineCore) -> tuple[dict[RequestId, Story], int]:
    """What everybody said, and the most bytes that backups took."""
    for one in _requests():
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    most = 0
    while core.step():
        tell(stories, core.drain())
        backups = [r.backup for r in core._requests.values() if r.status is Status.RETRACTED]
        most = max(most, sum(one.num_bytes for one in backups if one is not None))
    tell(stories, core.drain())
    assert core.memory.at_baseline()
    assert not core._requests
    return stories, most


def test_with_room_on_the_host_everybody_is_answered() -> None:
    core = _core(1 << 20)
    stories, most = _run(core)
    assert stories == _alone()
    assert most > 0
    assert core.stats().retractions > 0


@pytest.mark.parametrize("share", [1.0, 0.7, 0.4, 0.2])
def test_backups_stay_within_the_limit_and_who_is_answered_is_answered_right(share: float) -> None:
    _, unlimited = _run(_core(1 << 20))
    limit = int(unlimited * share)
    stories, most = _run(_core(limit))
    assert most <= limit
    for name, story in stories.items():
        if story.error is None:
            assert story == _alone()[name]
        else:
            assert isinstance(story.error, Overloaded)
            assert f"the limit is {limit}" in str(story.error)
    assert stories[NAMES[0]].error is None, "the oldest is never given up"


def test_where_nothing_can_be_backed_up_the_youngest_is_given_up_and_nobody_hangs() -> None:
    stories, most = _run(_core(0))
    assert most == 0
    errors = [name for name in NAMES if stories[name].error is not None]
    assert errors
    assert NAMES[0] not in errors
    assert all(stories[name] == _alone()[name] for name in NAMES if name not in errors)


def test_a_retraction_that_does_not_fit_is_refused_and_the_request_goes_on() -> None:
    core = toy_core(config=EngineConfig(backup_bytes=10))
    one = request("a", prompt_of(9))
    core.submit(one)
    core.step()
    with pytest.raises(Overloaded, match="don't fit beside 0 on the host, the limit is 10"):
        core.retract(one.request_id)
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    assert stories == run_all(toy_core(), [one])


def test_damaged_recurrent_state_is_not_backed_up() -> None:
    core = recurrent_core()
    one = request("a", prompt_of(9))
    core.submit(one)
    core.step()
    (active,) = core._scheduler._running
    Slots(core.memory).length[active.held_tables.slot, 0] = UNSETTLED
    with pytest.raises(InternalError, match=r"its recurrent state has taken in -1 \(kda.length\)"):
        core.retract(one.request_id)
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    assert isinstance(stories[one.request_id].error, InternalError)
    assert core.memory.at_baseline()


def test_a_victim_with_damaged_state_fails_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damaged(memory: Memory, tables: RequestTables) -> None:
        if tables.request_id == NAMES[-1]:
            raise InternalError("damaged")

    monkeypatch.setattr(scheduler, "check_settled", damaged)
    stories, _ = _run(_core(1 << 20))
    assert str(stories[NAMES[-1]].error) == "damaged"
    assert all(stories[name] == _alone()[name] for name in NAMES[:-1])
