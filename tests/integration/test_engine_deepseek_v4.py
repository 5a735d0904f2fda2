"""The engine on the DeepSeek-V4 model that ships: spec == plain, chunked == whole, disaggregated ==
aggregated.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.layout.component import Owner
from sluice.models.registry import LoadedModel, load_model
from sluice.pools.memory import build_memory
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, hand_over, run_all

MODEL = Path(__file__).parents[2] / "models" / "tiny-dsv4"
MODES = list(PoolMode)
# Every boundary of blocks (4, 128), window (32) and page (128).
LENGTHS = (1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 127, 128, 129, 130, 255, 256, 257)
MAX_TOKENS = 10
SAMPLED = Sampling(max_tokens=MAX_TOKENS, temperature=0.8, top_p=0.95, top_k=40)
GREEDY = Sampling(max_tokens=MAX_TOKENS, ignore_eos=True)


@functools.cache
def _model() -> LoadedModel:
    return load_model(MODEL)


def _core(
    mode: PoolMode,
    role: Role = Role.AGGREGATED,
    *,
    steps: int = 3,
    budget: int = 4096,
    prefix_bytes: int = 0,
) -> EngineCore:
    """Every item that a request receives holds NaN first."""
    model, spec = _model(), SpecConfig(steps)
    pool = PoolConfig(
        mode=mode, num_pages=64, num_window_pages=80, num_slots=len(LENGTHS), fill="nan"
    )
    assert model.draft is not None
    needs = model.target.state_needs(pool.kv_dtype) + model.draft.state_needs(pool.kv_dtype)
    memory = build_memory(needs, pool, spec.verify_tokens)
    config = EngineConfig(
        max_batch_tokens=budget,
        max_running=len(LENGTHS),
        prefix_bytes=prefix_bytes,
        prefix_interval_tokens=128,
    )
    return EngineCore(role, model.target, model.draft, memory, spec, config, pool)


def _requests(sampling: Sampling = GREEDY, lengths: Sequence[int] = LENGTHS) -> list[Request]:
    vocab = _model().target.info.vocab_size
    requests = []
    for n in lengths:
        generator = torch.Generator().manual_seed(n)
        # A short pattern repeated gives the draft something to be right about.
        pattern = torch.randint(3, vocab, (7,), generator=generator).tolist()
        prompt = tuple((pattern * (n // 7 + 1))[:n])
        requests.append(Request(RequestId(f"r{n}"), prompt, sampling))
    return requests


@functools.cache
def _plain() -> dict[RequestId, Story]:
    return run_all(_core(PoolMode.PAGED, steps=0), _requests())


@functools.cache
def _aggregated(mode: PoolMode, sampling: Sampling) -> dict[RequestId, Story]:
    return run_all(_core(mode), _requests(sampling))


def _tokens(stories: dict[RequestId, Story]) -> dict[RequestId, list[int]]:
    return {name: story.tokens for name, story in stories.items()}


@pytest.mark.parametrize("mode", MODES)
def test_speculation_changes_no_token(mode: PoolMode) -> None:
    stories = _aggregated(mode, GREEDY)
    assert _tokens(stories) == _tokens(_plain())
    accepted = [n for s in stories.values() for n in s.accepted if n is not None]
    assert max(accepted) >= 1, "a test of speculation in which nothing was ever accepted"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [7, 64])
def test_chunked_equals_whole(mode: PoolMode, budget: int) -> None:
    lengths = (1, 9, 33, 129, 130)
    requests = _requests(lengths=lengths)
    chunked = run_all(_core(mode, budget=budget), requests)
    whole = _aggregated(mode, GREEDY)
    assert chunked == {one.request_id: whole[one.request_id] for one in requests}


def test_one_token_a_step_equals_whole() -> None:
    requests = _requests(lengths=(1, 5, 33))
    chunked = run_all(_core(PoolMode.UNIFIED, budget=1), requests)
    assert _tokens(chunked) == {r.request_id: _plain()[r.request_id].tokens for r in requests}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_batched_equals_alone(mode: PoolMode, sampling: Sampling) -> None:
    core = _core(mode)
    for one in _requests(sampling, lengths=(3, 33, 130)):
        expected = _aggregated(mode, sampling)[one.request_id]
        assert run_all(core, [one])[one.request_id] == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("budget", [100, 4096])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_disaggregated_equals_aggregated_in_tokens_and_accepted_counts(
    mode: PoolMode, budget: int, sampling: Sampling
) -> None:
    prefill = _core(mode, Role.PREFILL, budget=budget)
    stories = hand_over(_requests(sampling), prefill, _core(mode, Role.DECODE))
    assert stories == _aggregated(mode, sampling)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_retraction_in_the_middle_changes_neither_tokens_nor_accepted_counts(
    mode: PoolMode, sampling: Sampling
) -> None:
    """Everybody is off the memory before the first decode step and after every second one."""
    prefill, decode = _core(mode, Role.PREFILL), _core(mode, Role.DECODE)
    stories = hand_over(_requests(sampling), prefill, decode, retract_every=2)
    assert stories == _aggregated(mode, sampling)
    assert decode.stats().retractions >= 2 * len(LENGTHS)


@pytest.mark.parametrize("mode", MODES)
def test_a_kept_prefix_changes_neither_tokens_nor_accepted_counts(mode: PoolMode) -> None:
    """Whole windows, tails and open blocks come back at a page's end, and the draft's window is the
    new prompt's own.
    """
    core, store_bytes = _core(mode, budget=100, prefix_bytes=1 << 28), 0
    longest = _requests(lengths=(257,))[0]
    for length in (257, 130, 257, 200, 160, 129):
        one = replace(longest, prompt=longest.prompt[:length])
        expected = run_all(_core(mode), [one])
        assert run_all(core, [one]) == expected, length
        prefixes = core._scheduler._prefixes
        assert prefixes is not None
        assert prefixes.num_bytes > 0
        assert store_bytes in (0, prefixes.num_bytes), "later prompts find what the first left"
        store_bytes = prefixes.num_bytes
        window = core.info.window_tokens
        assert prefixes.match(one.prompt, length - window).depth == (length - window) // 128 * 128


@pytest.mark.parametrize("mode", MODES)
def test_without_the_draft_component_tokens_are_equal_and_drafting_resumes(mode: PoolMode) -> None:
    prefill, decode = _core(mode, Role.PREFILL), _core(mode, Role.DECODE)
    stories = hand_over(_requests(), prefill, decode, with_draft=False)
    assert _tokens(stories) == _tokens(_plain())
    for story in stories.values():
        assert story.accepted[1] is None
        assert None not in story.accepted[2:-1]


def test_a_built_engine_describes_its_layout_and_runs() -> None:
    pool = PoolConfig(num_pages=16, num_window_pages=16, num_slots=2)
    core = build_engine(MODEL, Role.AGGREGATED, pool, SpecConfig(3), EngineConfig())
    layout = core.layout()
    assert layout.spec.algorithm == "mtp"
    assert layout.spec.draft_digest
    assert layout.model.weights_digest
    owners = [c.owner for c in layout.components]
    assert owners == sorted(owners, key=[Owner.TARGET, Owner.DRAFT].index)
    assert [c.name for c in layout.components][-2:] == ["draft.swa", "draft.hidden"]
    one = _requests(lengths=(9,))
    assert run_all(core, one)[RequestId("r9")].tokens == _plain()[RequestId("r9")].tokens
