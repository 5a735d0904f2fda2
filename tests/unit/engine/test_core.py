"""The engine on the toy model: equalities that must hold token for token, and endings."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import pytest

from sluice.config import EngineConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.errors import Aborted, BadRequest, ConfigError, InternalError, Overloaded
from sluice.models.base import ForwardBatch
from sluice.types import FinishReason, Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import (
    EOS,
    OracleDraft,
    ToyTarget,
    pool_config,
    prompt_of,
    request,
    toy_core,
)

MODES = list(PoolMode)
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 50)
WARM = {"temperature": 0.9, "top_p": 0.95, "top_k": 8}


def _requests(**sampling: object) -> list[Request]:
    return [request(f"r{n}", prompt_of(n), seed=n, **sampling) for n in LENGTHS]


@functools.cache
def _plain(temperature: float = 0.0) -> dict[RequestId, Story]:
    """Without a draft, whole prompts, paged: what everything else must equal."""
    return run_all(toy_core(steps=0), _requests())


def _truth() -> dict[RequestId, list[int]]:
    return {r.request_id: [*r.prompt, *_plain()[r.request_id].tokens] for r in _requests()}


def _tokens(stories: dict[RequestId, Story]) -> dict[RequestId, list[int]]:
    return {name: story.tokens for name, story in stories.items()}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_speculation_changes_no_token(mode: PoolMode, steps: int) -> None:
    stories = run_all(toy_core(mode=mode, steps=steps), _requests())
    assert _tokens(stories) == _tokens(_plain())
    assert all(s.finish is FinishReason.LENGTH and s.error is None for s in stories.values())


def _always(_: int) -> bool:
    return True


def _never(_: int) -> bool:
    return False


def _even(position: int) -> bool:
    return position % 2 == 0


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("right", "first_accepted"),
    # 12 tokens: the first comes from the prompt, the last step is capped to what remains.
    [(_always, [None, 3, 3, 2]), (_never, [None] + [0] * 10 + [None]), (_even, None)],
)
def test_any_draft_leaves_the_tokens_alone(
    mode: PoolMode, right: Callable[[int], bool], first_accepted: list[int | None] | None
) -> None:
    stories = run_all(toy_core(mode=mode, draft=OracleDraft(_truth(), right)), _requests())
    assert _tokens(stories) == _tokens(_plain())
    for story in stories.values():
        if first_accepted is not None:
            assert story.accepted == first_accepted
        else:
            assert set(story.accepted[1:-1]) <= {0, 1}
            assert 1 in story.accepted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [1, 3, 7, 64])
@pytest.mark.parametrize("warm", [False, True])
def test_chunked_equals_whole(mode: PoolMode, budget: int, warm: bool) -> None:
    requests = _requests(**(WARM if warm else {}))
    whole = run_all(toy_core(mode=mode, config=EngineConfig(max_batch_tokens=4096)), requests)
    chunked = run_all(toy_core(mode=mode, config=EngineConfig(max_batch_tokens=budget)), requests)
    assert chunked == whole


@pytest.mark.parametrize("mode", MODES)
def test_batched_equals_alone(mode: PoolMode) -> None:
    requests = _requests(**WARM)
    requests += [request(f"g{n}", prompt_of(n, 1)) for n in (2, 9, 20)]
    batched = run_all(toy_core(mode=mode, pool=pool_config(mode, num_slots=16)), requests)
    core = toy_core(mode=mode)
    for one in requests:
        assert run_all(core, [one])[one.request_id] == batched[one.request_id]


def test_seed_alone_decides_sampled_tokens() -> None:
    one = [request("a", prompt_of(9), seed=1, **WARM), request("b", prompt_of(9), seed=1, **WARM)]
    other = [request("c", prompt_of(9), seed=2, **WARM)]
    stories = run_all(toy_core(), one + other)
    assert stories[RequestId("a")].tokens == stories[RequestId("b")].tokens
    assert stories[RequestId("a")].tokens != stories[RequestId("c")].tokens


# ---- endings


def test_max_tokens_one_finishes_on_the_first_token() -> None:
    story = run_all(toy_core(), [request("r", prompt_of(9), max_tokens=1)])[RequestId("r")]
    assert story.tokens == _plain()[RequestId("r9")].tokens[:1]
    assert story.finish is FinishReason.LENGTH


@pytest.mark.parametrize("cut", range(12))
def test_a_stop_token_inside_an_accepted_run_cuts_it(cut: int) -> None:
    name = RequestId("r17")
    tokens = _plain()[name].tokens
    stop = tokens[cut]
    draft = OracleDraft(_truth(), _always)
    story = run_all(toy_core(draft=draft), [request(name, prompt_of(17), stop_token_ids=(stop,))])
    expected = tokens[: tokens.index(stop) + 1]
    assert story[name].tokens == expected
    assert story[name].finish is FinishReason.STOP


def test_eos_stops_unless_ignored() -> None:
    with_eos = [n for n in LENGTHS if EOS in _plain()[RequestId(f"r{n}")].tokens]
    assert with_eos
    for n in with_eos:
        one = request(f"r{n}", prompt_of(n), ignore_eos=False)
        story = run_all(toy_core(), [one])[one.request_id]
        assert story.tokens[-1] == EOS
        assert EOS not in story.tokens[:-1]
        assert story.finish is FinishReason.STOP


def test_a_raising_step_fails_its_batch_only_and_says_what_was_in_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    target = ToyTarget()

    def break_third(batch: ForwardBatch) -> None:
        if target.forwards == 3:
            raise ValueError("kernel exploded")

    target.before_forward = break_third
    core = toy_core(target=target)
    core.submit(request("a", prompt_of(5)))
    with caplog.at_level(logging.ERROR):
        stories: dict[RequestId, Story] = {}
        tell(stories, run_until_idle(core))
    error = stories[RequestId("a")].error
    assert isinstance(error, InternalError)
    assert "kernel exploded" in str(error)
    assert "decode a@" in caplog.text
    assert core.memory.at_baseline()
    assert run_all(core, [request("b", prompt_of(5))])[RequestId("b")].tokens


# ---- admission


def test_ids_in_use_bad_requests_and_a_full_queue_are_refused_and_queue_nothing() -> None:
    core = toy_core(config=EngineConfig(max_queue=2, max_model_tokens=64))
    core.submit(request("a", prompt_of(5)))
    with pytest.raises(BadRequest, match="in use"):
        core.submit(request("a", prompt_of(5)))
    with pytest.raises(BadRequest, match="limit of 64"):
        core.submit(request("b", prompt_of(60)))
    core.submit(request("b", prompt_of(5)))
    with pytest.raises(Overloaded, match="2 requests wait, the limit is 2"):
        core.submit(request("c", prompt_of(5)))
    assert core.stats().queued == 2
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    assert set(stories) == {"a", "b"}


def test_what_an_empty_memory_cannot_hold_is_refused_at_once() -> None:
    core = toy_core()  # 64 pages of 16 tokens
    with pytest.raises(BadRequest, match="empty memory"):
        core.submit(request("r", prompt_of(1100)))
    assert run_all(core, [request("s", prompt_of(900))])[RequestId("s")].error is None


def test_requests_of_another_role_are_refused() -> None:
    with pytest.raises(ConfigError, match="prefill engine"):
        toy_core(Role.PREFILL).submit(request("r", prompt_of(5)))
    with pytest.raises(ConfigError, match="aggregated engine"):
        toy_core().submit(request("r", prompt_of(5)), on_chunk=lambda chunk: None)


# ---- abort


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps_before", range(12))
def test_abort_after_any_number_of_steps_leaves_pools_at_baseline(
    mode: PoolMode, steps_before: int
) -> None:
    """With a budget of 7 and 20 prompt tokens: queued, mid-prefill, between chunks, running,
    finished.
    """
    core: EngineCore = toy_core(mode=mode, config=EngineConfig(max_batch_tokens=7))
    core.submit(request("a", prompt_of(20)))
    core.submit(request("b", prompt_of(9)))
    for _ in range(steps_before):
        core.step()
    core.abort(RequestId("a"))
    core.abort(RequestId("a"))
    stories: dict[RequestId, Story] = {}
    tell(stories, run_until_idle(core))
    aborted = stories[RequestId("a")]
    assert isinstance(aborted.error, Aborted) or aborted.finish is FinishReason.LENGTH
    assert stories[RequestId("b")].finish is FinishReason.LENGTH
    assert core.memory.at_baseline()
    core.memory.check()


def test_aborting_the_unknown_does_nothing() -> None:
    core = toy_core()
    core.abort(RequestId("nobody"))
    core.release(RequestId("nobody"))
    assert core.drain() == []


def test_window_pages_are_freed_as_the_window_moves() -> None:
    """200 tokens are 13 pages of history, but window state of 8 tokens never needs more than 2 or
    so.
    """
    core = toy_core()
    core.submit(request("r", prompt_of(50), max_tokens=150))
    most: dict[str, int] = {}
    while core.step():
        for space in core.stats().occupancy:
            name = space.space.value
            most[name] = max(most.get(name, 0), space.held)
    assert most["PAGE"] == 13
    assert 1 <= most["WINDOW_PAGE"] <= 2
