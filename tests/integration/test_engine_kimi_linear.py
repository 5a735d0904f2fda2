"""The engine on a tiny Kimi Linear: speculation with right, wrong and half-right drafts, hand-over, and
retraction change no token, and every recurrent state equals that of a fresh run, bit for bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.models.base import DraftModel
from sluice.models.kimi_linear.kda import KdaBuffers
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.kimi_linear.pending import KimiPendingVerify
from sluice.pools.memory import Memory, build_memory
from sluice.spec.commit import CommittedTarget
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, hand_over, run_all, tell
from tests.unit.engine.toy_model import DRAFT_NEEDS, OracleDraft
from tests.unit.models.kimi_linear.tiny import prompt, tiny_target

MODES = list(PoolMode)
LENGTHS = (1, 2, 3, 4, 5, 15, 16, 17, 40)
STEPS, VOCAB = 3, 64
HIDDEN_ONLY = DRAFT_NEEDS[1:]  # the model has no window for a draft to share
SAMPLED = {"temperature": 0.8, "top_p": 0.9}


@functools.cache
def _target() -> KimiLinearTarget:
    return tiny_target()


def _core(
    role: Role = Role.AGGREGATED,
    mode: PoolMode = PoolMode.PAGED,
    *,
    draft: DraftModel | None = None,
    budget: int = 4096,
    prefix_bytes: int = 0,
) -> EngineCore:
    spec = SpecConfig(STEPS)
    pool = PoolConfig(mode=mode, page_tokens=16, num_pages=80, num_slots=12, fill="nan")
    needs = (*_target().state_needs(pool.kv_dtype), *HIDDEN_ONLY)
    memory = build_memory(needs, pool, spec.verify_tokens)
    config = EngineConfig(
        max_batch_tokens=budget, prefix_bytes=prefix_bytes, prefix_interval_tokens=16
    )
    return EngineCore(role, _target(), draft, memory, spec, config, pool)


def _requests(**sampling: object) -> list[Request]:
    chosen = [
        Sampling(**{"max_tokens": 10, "ignore_eos": True, "seed": n, **sampling})  # type: ignore[arg-type]
        for n in LENGTHS
    ]
    return [
        Request(RequestId(f"r{n}"), prompt(n, n), s) for n, s in zip(LENGTHS, chosen, strict=True)
    ]


@functools.cache
def _plain(sampled: bool = False) -> dict[RequestId, Story]:
    return run_all(_core(), _requests(**(SAMPLED if sampled else {})))


def _oracle(right: Callable[[int], bool]) -> OracleDraft:
    truth = {r.request_id: [*r.prompt, *_plain()[r.request_id].tokens] for r in _requests()}
    return OracleDraft(truth, right, vocab_size=VOCAB, needs=HIDDEN_ONLY)


def _always(_: int) -> bool:
    return True


def _never(_: int) -> bool:
    return False


def _half(position: int) -> bool:
    return position % 2 == 0


RIGHT = [_always, _never, _half]


def _tokens(stories: dict[RequestId, Story]) -> dict[RequestId, list[int]]:
    return {name: story.tokens for name, story in stories.items()}


def _state(memory: Memory, slot: int) -> list[torch.Tensor]:
    return [
        memory.buffer(name, entry.layer_id)[slot].clone()
        for name in ("kda.conv", "kda.recurrent", "kda.length")
        for entry in memory.component(name).entries
    ]


@functools.cache
def _serial(name: RequestId, committed: int) -> list[torch.Tensor]:
    """The state that a run without drafts has when it has taken in so many tokens."""
    core = _core()
    core.submit(next(one for one in _requests() if one.request_id == name))
    while core.step():
        (active,) = core._scheduler._running
        if active.held_tables.kv_len == committed:
            return _state(core.memory, active.held_tables.slot)
    raise AssertionError(f"{name} never had {committed} tokens")


def _same_states(core: EngineCore) -> bool:
    return all(
        torch.equal(one, other)
        for active in core._scheduler._running
        for one, other in zip(
            _state(core.memory, active.held_tables.slot),
            _serial(active.request_id, active.held_tables.kv_len),
            strict=True,
        )
    )


@pytest.mark.parametrize("right", RIGHT)
def test_speculation_changes_no_token_and_no_bit_of_any_state(
    right: Callable[[int], bool],
) -> None:
    core = _core(draft=_oracle(right))
    for one in _requests():
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    while core.step():
        assert _same_states(core)
        tell(stories, core.drain())
    assert _tokens(stories) == _tokens(_plain())
    accepted = [n for story in stories.values() for n in story.accepted if n is not None]
    assert max(accepted) == {_always: STEPS, _never: 0, _half: 1}[right]
    assert core.memory.at_baseline()


@pytest.mark.parametrize("budget", [3, 16])
def test_chunked_equals_whole(budget: int) -> None:
    assert _tokens(run_all(_core(budget=budget), _requests())) == _tokens(_plain())


def test_a_kept_prefix_changes_no_token() -> None:
    core = _core(prefix_bytes=1 << 24)
    longest = _requests()[-1]
    for length in (40, 40, 33, 32, 17):
        one = replace(longest, prompt=longest.prompt[:length])
        assert _tokens(run_all(core, [one])) == _tokens(run_all(_core(), [one]))
    prefixes = core._scheduler._prefixes
    assert prefixes is not None
    assert prefixes.match(longest.prompt, 39).depth == 32


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("retract_every", [0, 1])
@pytest.mark.parametrize("sampled", [False, True])
def test_disaggregated_and_retracted_equals_aggregated(
    mode: PoolMode, retract_every: int, sampled: bool
) -> None:
    decode = _core(Role.DECODE, mode)
    requests = _requests(**(SAMPLED if sampled else {}))
    stories = hand_over(
        requests, _core(Role.PREFILL, mode, budget=9), decode, retract_every=retract_every
    )
    assert _tokens(stories) == _tokens(_plain(sampled))
    assert decode.stats().retractions >= retract_every * len(LENGTHS)


@pytest.mark.parametrize("mode", MODES)
def test_retracted_with_a_draft_equals_aggregated_in_accepted_counts_too(mode: PoolMode) -> None:
    draft = _oracle(_half)
    prefill, decode = (_core(role, mode, draft=draft) for role in (Role.PREFILL, Role.DECODE))
    stories = hand_over(_requests(), prefill, decode, retract_every=1)
    assert stories == run_all(_core(mode=mode, draft=draft), _requests())


# ---- mutations on the real model; ``tests/unit/engine/test_recurrent`` has the rest

_commit = CommittedTarget.commit


def _errors(draft: OracleDraft) -> list[str]:
    stories = run_all(_core(draft=draft), _requests())
    return [str(story.error) for story in stories.values() if story.error is not None]


def test_dropping_the_commit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CommittedTarget, "commit", lambda self, accepted: None)
    errors = _errors(_oracle(_half))
    assert len(errors) == len(LENGTHS)
    assert all("a verify is open" in error for error in errors)


@pytest.mark.parametrize("shift", [1, -1])
def test_committing_a_token_too_many_or_too_few_is_caught(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    def shifted(self: CommittedTarget, accepted: Sequence[int]) -> None:
        _commit(self, [count + shift for count in accepted])

    monkeypatch.setattr(CommittedTarget, "commit", shifted)
    errors = _errors(_oracle(_half))
    assert len(errors) == len(LENGTHS)
    assert all("has taken in" in error for error in errors)


def test_committing_only_conv_is_caught_by_the_fresh_run(monkeypatch: pytest.MonkeyPatch) -> None:
    write = KimiPendingVerify._write

    def only_conv(self: KimiPendingVerify, rows: list[int], counts: list[int]) -> None:
        buffers: list[KdaBuffers] = [layer.buffers for layer in self._layers]
        kept = [one.recurrent.clone() for one in buffers]
        write(self, rows, counts)
        for one, recurrent in zip(buffers, kept, strict=True):
            one.recurrent.copy_(recurrent)

    monkeypatch.setattr(KimiPendingVerify, "_write", only_conv)
    core = _core(draft=_oracle(_half))
    for one in _requests():
        core.submit(one)
    core.step()
    assert _same_states(core)
    core.step()
    assert not _same_states(core)
