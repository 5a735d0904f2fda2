"""Requests taken off their memory come back and go on as if nothing had happened."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

import pytest

from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Reserved
from sluice.errors import Aborted, BadRequest, ConfigError, IllegalTransition
from sluice.pools.slots import SlotPool
from sluice.types import FinishReason, Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.facade_harness import Gate, read, running, settled
from tests.unit.engine.toy_model import copy_state, prompt_of, request, toy_core

MODES = list(PoolMode)
LENGTHS = (1, 3, 4, 8, 9, 16, 33)
WARM = {"temperature": 0.9, "top_p": 0.95, "top_k": 8}
A, B = RequestId("a"), RequestId("b")


def _requests(max_tokens: int = 12) -> list[Request]:
    return [request(f"r{n}", prompt_of(n), seed=n, max_tokens=max_tokens, **WARM) for n in LENGTHS]


@functools.cache
def _undisturbed(mode: PoolMode, steps: int, max_tokens: int = 12) -> dict[RequestId, Story]:
    return run_all(toy_core(mode=mode, steps=steps), _requests(max_tokens))


def _running(core: EngineCore) -> list[RequestId]:
    return [r.request_id for r in core._scheduler._running]


def _finish(core: EngineCore) -> dict[RequestId, Story]:
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    return stories


# ---- forced


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("every", [1, 3])
def test_retracted_between_any_two_steps_output_is_identical(
    mode: PoolMode, steps: int, every: int
) -> None:
    """All running requests are off at once, newest first, so they come back in one another's items,
    which hold NaN until something is restored into them.
    """
    core = toy_core(mode=mode, steps=steps)
    for one in _requests():
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    for count in range(1, 200):
        worked = core.step()
        if count % every == 0:
            for name in reversed(_running(core)):
                core.retract(name)
            assert _running(core) == []
        tell(stories, core.drain())
        if not worked and core.stats().retracted == 0:
            break
    assert stories == _undisturbed(mode, steps)
    assert core.stats().retractions >= len(LENGTHS)
    assert core.memory.at_baseline()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("with_draft", [True, False])
def test_retracted_after_a_hand_over_output_is_identical(mode: PoolMode, with_draft: bool) -> None:
    """Also before the first decode step, and when no draft state ever came."""
    requests = _requests()
    outcomes = []
    for disturb in (False, True):
        decode = toy_core(Role.DECODE, mode)
        _adopt_all(decode, mode, requests, with_draft=with_draft)
        stories: dict[RequestId, Story] = {}
        while True:
            if disturb:
                for name in _running(decode):
                    decode.retract(name)
            worked = decode.step()
            tell(stories, decode.drain())
            if not worked:
                break
        assert decode.memory.at_baseline()
        outcomes.append(stories)
    assert outcomes[0] == outcomes[1]
    assert set(outcomes[0]) == {one.request_id for one in requests}


def _adopt_all(
    decode: EngineCore,
    mode: PoolMode,
    requests: Sequence[Request],
    *,
    steps: int = 3,
    with_draft: bool = True,
) -> None:
    prefill = toy_core(Role.PREFILL, mode, steps=steps)
    chunks: dict[RequestId, ChunkReady] = {}
    for one in requests:
        prefill.submit(one, lambda chunk: chunks.__setitem__(chunk.request_id, chunk))
        decode.submit(one)
    run_until_idle(prefill)
    decode.step()
    for output in decode.drain():
        assert isinstance(output, Reserved)
        chunk, target = chunks[output.request_id], output.reservation
        copy_state(
            prefill.memory,
            chunk.tables,
            decode.memory,
            target.tables,
            len(target.request.prompt),
            with_draft=with_draft,
        )
        assert chunk.first_token is not None
        decode.adopt(output.request_id, chunk.first_token, draft_valid=with_draft)


def test_only_running_requests_can_be_retracted() -> None:
    core = toy_core(config=EngineConfig(max_batch_tokens=4, max_running=1))
    core.submit(request("a", prompt_of(9)))
    core.submit(request("b", prompt_of(9)))
    core.step()
    for name, status in ((A, "prefilling"), (B, "queued")):
        with pytest.raises(IllegalTransition, match=f"{status} -> retracted"):
            core.retract(name)
    with pytest.raises(IllegalTransition, match="not here"):
        core.retract(RequestId("nobody"))
    assert all(story.error is None for story in _finish(core).values())


def test_the_retracted_comes_back_before_anybody_new() -> None:
    core = toy_core(config=EngineConfig(max_running=1))
    core.submit(request("a", prompt_of(9), max_tokens=30))
    core.step()
    core.submit(request("b", prompt_of(3)))
    core.retract(A)
    core.step()
    assert _running(core) == [A]
    assert core.stats().queued == 1
    assert set(_finish(core)) == {A, B}


def test_the_older_comes_back_first_whoever_was_taken_off_first() -> None:
    core = toy_core()
    for name in ("a", "b"):
        core.submit(request(name, prompt_of(9)))
    core.step()
    core.retract(B)
    core.retract(A)
    core.step()
    assert _running(core) == [A, B]
    assert set(_finish(core)) == {A, B}


# ---- ends while off


@pytest.mark.parametrize("mode", MODES)
def test_a_retracted_request_holds_nothing_and_can_be_aborted(mode: PoolMode) -> None:
    core = toy_core(mode=mode)
    core.submit(request("a", prompt_of(9), max_tokens=30))
    core.step()
    core.step()
    core.retract(A)
    stats = core.stats()
    assert core.memory.at_baseline()
    assert (stats.queued, stats.running, stats.waiting, stats.retracted) == (0, 0, 0, 1)
    with pytest.raises(IllegalTransition, match="which is retracted"):
        core.release(A)
    active = core._requests[A]
    core.abort(A)
    assert active.backup is None, "the copy goes with the request"
    assert isinstance(_finish(core)[A].error, Aborted)
    assert core.stats().retracted == 0
    assert core.memory.at_baseline()


def test_shutdown_fails_the_retracted() -> None:
    core = toy_core()
    core.submit(request("a", prompt_of(9), max_tokens=30))
    core.step()
    core.retract(A)
    core.shutdown(Aborted("stopping"))
    stories: dict[RequestId, Story] = {}
    tell(stories, core.drain())
    assert isinstance(stories[A].error, Aborted)
    assert core.memory.at_baseline()


# ---- memory pressure


def _tight(mode: PoolMode, pages: int = 7, windows: int = 14) -> PoolConfig:
    return PoolConfig(
        mode=mode,
        page_tokens=16,
        num_pages=pages,
        num_window_pages=windows,
        num_slots=8,
        fill="nan",
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("promised", [0.0, 0.3])
def test_overcommitted_memory_changes_no_output(
    mode: PoolMode, steps: int, promised: float
) -> None:
    config = EngineConfig(promised_output=promised)
    core = toy_core(mode=mode, steps=steps, config=config, pool=_tight(mode))
    assert run_all(core, _requests(40)) == _undisturbed(mode, steps, 40)
    assert core.stats().retractions > 0, "a test of pressure without any"


@pytest.mark.parametrize("mode", MODES)
def test_overcommitted_window_pages_change_no_output(mode: PoolMode) -> None:
    config = EngineConfig(promised_output=0.0)
    core = toy_core(mode=mode, config=config, pool=_tight(mode, pages=64, windows=5))
    assert run_all(core, _requests(40)) == _undisturbed(mode, 3, 40)


def test_what_can_never_be_held_whole_is_refused_although_less_is_promised() -> None:
    core = toy_core(config=EngineConfig(promised_output=0.0), pool=_tight(PoolMode.PAGED))
    with pytest.raises(BadRequest, match="empty memory"):
        core.submit(request("a", prompt_of(16), max_tokens=100))


def test_without_overcommitment_nobody_is_ever_retracted() -> None:
    core = toy_core(pool=_tight(PoolMode.PAGED))
    assert run_all(core, _requests(40)) == _undisturbed(PoolMode.PAGED, 3, 40)
    assert core.stats().retractions == 0


def test_the_oldest_is_never_taken_off_so_there_is_always_progress() -> None:
    """Two requests that each fit alone and not together, in the least memory that takes either."""
    config = EngineConfig(promised_output=0.0)
    core = toy_core(steps=0, config=config, pool=_tight(PoolMode.PAGED, pages=7))
    core.submit(request("a", prompt_of(16), max_tokens=90))
    core.submit(request("b", prompt_of(16), max_tokens=90))
    for _ in range(300):
        core.step()
        if A in core._requests and core.stats().retracted:
            assert _running(core)[0] == A
    stories: dict[RequestId, Story] = {}
    tell(stories, core.drain())
    assert [story.finish for story in stories.values()] == [FinishReason.LENGTH] * 2
    assert core.stats().retractions > 0
    assert core.memory.at_baseline()


def test_nobody_new_takes_what_a_retracted_request_waits_for() -> None:
    """The newcomer would fit into what is free; who is off doesn't, and would wait for ever."""
    config = EngineConfig(promised_output=0.0)
    core = toy_core(steps=0, config=config, pool=_tight(PoolMode.PAGED, pages=7))
    core.submit(request("a", prompt_of(16), max_tokens=90))
    core.submit(request("b", prompt_of(16), max_tokens=90))
    while core.stats().retracted == 0:
        core.step()
    assert core.memory.can_open(10)
    core.submit(request("c", prompt_of(3), max_tokens=3))
    while core.stats().retracted == 1:
        assert core.stats().queued == 1
        core.step()
    assert all(story.error is None for story in _finish(core).values())
    assert core.memory.at_baseline()


def test_a_request_whose_room_is_reserved_waits_and_nobody_is_admitted_before_it() -> None:
    """Reservations can't be taken off: a peer writes into them. They end, and then it goes on."""
    config = EngineConfig(promised_output=0.0)
    decode = toy_core(
        Role.DECODE, PoolMode.PAGED, steps=0, config=config, pool=_tight(PoolMode.PAGED, pages=7)
    )
    one = request("a", prompt_of(16), max_tokens=60)
    expected = run_all(toy_core(steps=0), [one])[A].tokens
    _adopt_all(decode, PoolMode.PAGED, [one], steps=0)
    decode.submit(request("b", prompt_of(70), max_tokens=20))
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(decode))
    decode.submit(request("c", prompt_of(3), max_tokens=3))
    tell(stories, run_until_idle(decode))
    assert decode.stats().running == 1, "a waits"
    assert decode.stats().queued == 1, "c must not take what a waits for"
    assert len(stories[A].tokens) < 60
    decode.release(B)
    tell(stories, run_until_idle(decode))
    assert stories[A].tokens == expected
    decode.release(RequestId("c"))
    assert decode.memory.at_baseline()


@pytest.mark.parametrize("promised", [-0.1, 1.1, float("nan")])
def test_an_impossible_share_is_refused(promised: float) -> None:
    with pytest.raises(ConfigError, match="promised_output is"):
        toy_core(config=EngineConfig(promised_output=promised))


def test_state_that_cannot_be_backed_up_is_refused_where_something_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SlotPool, "whole_in_rows", False)
    for role in (Role.DECODE, Role.AGGREGATED):
        with pytest.raises(ConfigError, match="could be taken off but never restored"):
            toy_core(role)
    toy_core(Role.PREFILL)


# ---- the asyncio side


@pytest.mark.asyncio
async def test_a_stream_does_not_notice() -> None:
    one = request("a", prompt_of(9), max_tokens=60, seed=3, **WARM)
    expected = run_all(toy_core(), [one])[A].tokens
    core = toy_core()
    async with running(core) as facade:
        stream = facade.generate(one)
        tokens = list((await anext(stream)).token_ids)
        await facade.retract(A)
        tokens += await read(stream)
        assert tokens == expected
        assert (await facade.stats()).retractions == 1
        with pytest.raises(IllegalTransition):
            await facade.retract(A)
        await settled(facade)


@pytest.mark.asyncio
async def test_a_reader_that_leaves_while_its_request_is_off_leaves_nothing() -> None:
    gate = Gate(after=2)
    core = toy_core(target=gate.target)
    async with running(core) as facade:
        stream = facade.generate(request("a", prompt_of(9), max_tokens=60))
        await anext(stream)
        await gate.reached()
        retracted = asyncio.create_task(facade.retract(A))
        await asyncio.sleep(0)
        await stream.aclose()  # both commands wait for the step to end
        gate.open.set()
        await retracted
        await settled(facade)
        assert (await facade.stats()).retracted == 0
