"""Recurrent state under speculation: committed at the accepted length, every time, or somebody screams.

The second half breaks the engine in each way known from production and shows what notices.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import pytest

from sluice.config import EngineConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Reserved
from sluice.engine.sampler import StepSampler
from sluice.errors import ConfigError, IllegalTransition, InternalError, SluiceError
from sluice.models.base import ForwardBatch, Segment
from sluice.models.recurrent import RecurrentTarget
from sluice.spec.commit import CommittedTarget
from sluice.types import Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import OracleDraft, copy_state, prompt_of, request
from tests.unit.engine.toy_recurrent import (
    LENGTH,
    RecurrentToy,
    Slots,
    State,
    ToyPending,
    fold,
    recurrent_core,
)

MODES = list(PoolMode)
LENGTHS = (1, 2, 3, 4, 9, 17)
WARM = {"temperature": 0.9, "top_p": 0.95, "top_k": 8}
Right = Callable[[int], bool]


def _requests(**sampling: object) -> list[Request]:
    return [request(f"r{n}", prompt_of(n), seed=n, **sampling) for n in LENGTHS]


@functools.cache
def _plain() -> dict[RequestId, Story]:
    """No draft, so no verify: every forward moves every state on by itself."""
    return run_all(recurrent_core(steps=0), _requests())


def _oracle(right: Right) -> OracleDraft:
    truth = {r.request_id: [*r.prompt, *_plain()[r.request_id].tokens] for r in _requests()}
    return OracleDraft(truth, right)


def _always(_: int) -> bool:
    return True


def _never(_: int) -> bool:
    return False


def _half(position: int) -> bool:
    return position % 2 == 0


RIGHT = [_always, _never, _half]


def _tokens(stories: dict[RequestId, Story]) -> dict[RequestId, list[int]]:
    return {name: story.tokens for name, story in stories.items()}


def _check_states(core: EngineCore) -> int:
    """Every running request's state is that of a fresh run over its committed tokens."""
    slots = Slots(core.memory)
    for active in core._scheduler._running:
        tables = active.held_tables
        committed = [*active.request.prompt, *active.output[:-1]]
        assert len(committed) == tables.kv_len == int(slots.length[tables.slot, 0])
        assert slots.read(tables.slot) == fold(committed)
    return len(core._scheduler._running)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("steps", [1, 3, 5])
def test_speculation_changes_no_token_and_every_state_equals_a_fresh_run(
    mode: PoolMode, right: Right, steps: int
) -> None:
    core = recurrent_core(mode=mode, steps=steps, draft=_oracle(right))
    for one in _requests():
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    checked = 0
    while core.step():
        checked += _check_states(core)
        tell(stories, core.drain())
    assert checked > len(LENGTHS)
    assert _tokens(stories) == _tokens(_plain())
    accepted = [n for story in stories.values() for n in story.accepted if n is not None]
    assert max(accepted) == {_always: steps, _never: 0, _half: 1}[right]


@pytest.mark.parametrize("budget", [1, 7, 512])
def test_chunks_and_batches_change_nothing(budget: int) -> None:
    requests = _requests(**WARM)
    whole = run_all(recurrent_core(), requests)
    config = EngineConfig(max_batch_tokens=budget)
    assert run_all(recurrent_core(config=config), requests) == whole
    core = recurrent_core(mode=PoolMode.UNIFIED)
    for one in requests:
        assert run_all(core, [one])[one.request_id] == whole[one.request_id]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("skip", ["", "kda.conv", "kda.recurrent", "kda.length"])
def test_disaggregated_and_retracted_equals_aggregated_unless_state_is_missing(
    mode: PoolMode, skip: str
) -> None:
    requests = _requests(**WARM)
    prefill, decode = recurrent_core(Role.PREFILL, mode), recurrent_core(Role.DECODE, mode)
    chunks: dict[RequestId, ChunkReady] = {}
    for one in requests:
        prefill.submit(one, lambda chunk: chunks.__setitem__(chunk.request_id, chunk))
        decode.submit(one)
    run_until_idle(prefill)
    for output in run_until_idle(decode):
        assert isinstance(output, Reserved)
        chunk, tables = chunks[output.request_id], output.reservation.tables
        length = len(output.reservation.request.prompt)
        copy_state(prefill.memory, chunk.tables, decode.memory, tables, length, skip=skip)
        assert chunk.first_token is not None
        decode.adopt(output.request_id, chunk.first_token)
    stories: dict[RequestId, Story] = {}
    worked = True
    while worked:
        for active in reversed(decode._scheduler._running.copy()):
            if skip == LENGTH.name:
                with pytest.raises(InternalError, match="its recurrent state has taken in"):
                    decode.retract(active.request_id)
            else:
                decode.retract(active.request_id)
        worked = decode.step()
        tell(stories, decode.drain())
    assert decode.memory.at_baseline()
    if skip:
        assert all(story.error is not None for story in stories.values())
    else:
        assert stories == run_all(recurrent_core(mode=mode), requests)


def test_a_step_that_fails_after_its_verify_leaves_nothing_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(*_: object) -> None:
        raise ValueError("no choice")

    core = recurrent_core()
    core.submit(request("a", prompt_of(5)))
    core.step()
    with monkeypatch.context() as broken:
        broken.setattr(StepSampler, "verify", explode)
        core.step()
    stories: dict[RequestId, Story] = {}
    tell(stories, core.drain())
    assert isinstance(stories[RequestId("a")].error, InternalError)
    assert _tokens(run_all(core, _requests())) == _tokens(_plain())


def test_a_tree_of_drafts_is_refused_at_start_up_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="topk is 2: a tree of drafts can't be verified"):
        recurrent_core(spec=SpecConfig(3, topk=2))


def test_recurrent_state_without_its_length_is_refused_at_start_up() -> None:
    class Uncounted(RecurrentToy):
        def state_needs(self, kv_dtype: str):  # type: ignore[no-untyped-def]
            return tuple(spec for spec in super().state_needs(kv_dtype) if spec is not LENGTH)

    with pytest.raises(ConfigError, match="no STATE_LENGTH beside it"):
        recurrent_core(target=Uncounted())


# ---- mutations: each way of forgetting the commit, and what notices

Commit = Callable[[CommittedTarget, Sequence[int]], None]
_commit = CommittedTarget.commit


def _errors(monkeypatch: pytest.MonkeyPatch, commit: Commit, right: Right) -> list[SluiceError]:
    """What every request ends with when the engine commits like this."""
    monkeypatch.setattr(CommittedTarget, "commit", commit)
    core = recurrent_core(draft=_oracle(right))
    return [story.error for story in run_all(core, _requests()).values() if story.error]


@pytest.mark.parametrize("right", RIGHT)
def test_dropping_the_commit_is_caught_by_the_next_forward(
    monkeypatch: pytest.MonkeyPatch, right: Right
) -> None:
    errors = _errors(monkeypatch, lambda self, accepted: None, right)
    assert len(errors) == len(LENGTHS)
    assert all("forward while a verify is open" in str(error) for error in errors)


@pytest.mark.parametrize("right", RIGHT)
def test_dropping_commit_and_guard_is_caught_by_the_length(
    monkeypatch: pytest.MonkeyPatch, right: Right
) -> None:
    errors = _errors(monkeypatch, lambda self, accepted: self.discard(), right)
    assert len(errors) == len(LENGTHS)
    assert all("its recurrent state has taken in" in str(error) for error in errors)


@pytest.mark.parametrize("right", [_never, _half])
def test_committing_at_commit_lens_instead_of_one_less_is_caught_by_the_length(
    monkeypatch: pytest.MonkeyPatch, right: Right
) -> None:
    errors = _errors(monkeypatch, lambda self, a: _commit(self, [n + 1 for n in a]), right)
    assert len(errors) == len(LENGTHS)
    assert all("its recurrent state has taken in" in str(error) for error in errors)


def test_skipping_the_commit_on_zero_accepted_is_caught_by_the_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    errors = _errors(monkeypatch, lambda self, a: _commit(self, [n or -1 for n in a]), _never)
    assert len(errors) == len(LENGTHS)
    assert all("its recurrent state has taken in" in str(error) for error in errors)


def _keep_open(self: CommittedTarget, accepted: Sequence[int]) -> None:
    """The overlapped engine that meant to commit while the next forward is running."""


@pytest.mark.parametrize("right", RIGHT)
def test_committing_after_the_next_forward_is_caught_by_that_forward(
    monkeypatch: pytest.MonkeyPatch, right: Right
) -> None:
    errors = _errors(monkeypatch, _keep_open, right)
    assert len(errors) == len(LENGTHS)
    assert all(type(error.__cause__) is IllegalTransition for error in errors)


@pytest.mark.parametrize("right", RIGHT)
def test_committing_after_the_next_forward_past_the_guard_is_caught_by_the_length(
    monkeypatch: pytest.MonkeyPatch, right: Right
) -> None:
    forward = CommittedTarget.forward

    def overlapped(self: CommittedTarget, batch: ForwardBatch, *args: object) -> object:
        pending, self._pending = self._pending, None
        hidden = forward(self, batch, *args)  # type: ignore[arg-type]
        if pending is not None:
            pending.commit([1 for _ in batch.segments])
        return hidden

    monkeypatch.setattr(CommittedTarget, "forward", overlapped)
    errors = _errors(monkeypatch, _keep_open, right)
    assert len(errors) == len(LENGTHS)
    assert all("its recurrent state has taken in" in str(error) for error in errors)


class _OnlyConv(ToyPending):
    """Conv and length advance: the guard and the length are satisfied, and the tokens drift."""

    def _write(self, segment: Segment, state: State, length: int) -> None:
        kept = self._slots.read(segment.tables.slot)
        super()._write(segment, State(state.conv, kept.folded), length)


class _OnlyRecurrent(ToyPending):
    def _write(self, segment: Segment, state: State, length: int) -> None:
        kept = self._slots.read(segment.tables.slot)
        super()._write(segment, State(kept.conv, state.folded), length)


@pytest.mark.parametrize("pending", [_OnlyConv, _OnlyRecurrent])
@pytest.mark.parametrize("right", RIGHT)
def test_committing_only_conv_or_only_the_rest_is_caught_by_the_fresh_run(
    pending: type[ToyPending], right: Right
) -> None:
    target = RecurrentToy()
    target.pending = pending  # type: ignore[assignment]
    core = recurrent_core(target=target, draft=_oracle(right))
    for one in _requests():
        core.submit(one)
    core.step()
    _check_states(core)
    core.step()
    with pytest.raises(AssertionError):
        _check_states(core)


class _Wrapper:
    """Looks like the model in every way ``hasattr`` can see."""

    def __init__(self, inner: RecurrentToy) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)


class _HalfWrapper(RecurrentTarget):
    def __init__(self, inner: RecurrentToy) -> None:
        self._inner = inner


def test_hiding_the_commit_behind_a_wrapper_is_refused_at_start_up() -> None:
    wrapper = _Wrapper(RecurrentToy())
    assert hasattr(wrapper, "verify")
    with pytest.raises(ConfigError, match="_Wrapper does not implement RecurrentTarget"):
        recurrent_core(target=wrapper)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="abstract method"):
        _HalfWrapper(RecurrentToy())  # type: ignore[abstract]
