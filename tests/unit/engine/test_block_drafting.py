"""The engine with a DSPARK draft on a tiny Qwen3: any draft leaves the tokens alone, moved state drafts
the same.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice.config import EngineConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady
from sluice.errors import ConfigError
from sluice.models.dspark.model import Block, DSparkDraft
from sluice.models.dspark.weights import read_weights
from sluice.pools.base import RequestTables, StateMemory
from sluice.pools.memory import build_memory
from sluice.types import Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_model import copy_state, request
from tests.unit.models.dspark.tiny import (
    BLOCK,
    TARGET_CONFIG,
    Pair,
    Tensors,
    inject,
    make_pair,
    memory_of,
    opened,
    pair_on,
    pool_config,
    prompt_of,
)
from tests.unit.models.kimi_linear.tiny import tiny_target

LENGTHS = (1, 2, 7, 8, 9, 23)
OUTPUT = 14


class SpyDraft(DSparkDraft):
    """A real draft that writes down each request's block logits, and may know the truth.

    ``right(position)`` says where it proposes the true token; elsewhere a wrong one.
    """

    def __init__(
        self,
        pair: Pair,
        truth: Mapping[RequestId, Sequence[int]] | None = None,
        right: Callable[[int], bool] = bool,
    ) -> None:
        weights = read_weights(Tensors(0, dict(pair.tensors)), pair.draft.config)
        super().__init__(pair.draft.config, weights, pair.target, "spy")
        self.blocks: dict[tuple[RequestId, int], torch.Tensor] = {}
        self._truth = truth
        self._right = right

    def block(
        self, tables: Sequence[RequestTables], anchors: Sequence[int], memory: StateMemory
    ) -> Block:
        block = super().block(tables, anchors, memory)
        for one, logits_SV in zip(tables, block.logits_BSV, strict=True):
            self.blocks[one.request_id, one.kv_len] = logits_SV.clone()
        if self._truth is None:
            return block
        return Block(block.hidden_BSD, torch.stack([self._known(one) for one in tables]))

    def _known(self, tables: RequestTables) -> torch.Tensor:
        assert self._truth is not None
        truth = self._truth[tables.request_id]
        vocab = self.config.layers.vocab_size
        logits_SV = torch.zeros(BLOCK, vocab)
        for s, position in enumerate(range(tables.kv_len + 1, tables.kv_len + 1 + BLOCK)):
            token = truth[position] if position < len(truth) else 0
            token = token if self._right(position) else (token + 1) % vocab
            logits_SV[s, token] = 1e4  # beyond what the Markov head can turn
        return logits_SV


QWEN3, KIMI = "qwen3", "kimi_linear"
FAMILIES = [QWEN3, KIMI]


@functools.cache
def _pair(family: str = QWEN3) -> Pair:
    if family == QWEN3:
        return make_pair(markov_head_type="rnn")
    fitting = {"vocab_size": 64, "hidden_size": 64, "mask_token_id": 63}
    return pair_on(tiny_target(), markov_head_type="gated", **fitting)


def _core(
    role: Role = Role.AGGREGATED,
    draft: DSparkDraft | None = None,
    *,
    family: str = QWEN3,
    steps: int = BLOCK,
    batch_tokens: int = 512,
) -> EngineCore:
    pair, pool = _pair(family), pool_config()
    draft = draft or pair.draft
    needs = pair.target.state_needs("float32") + draft.state_needs("float32")
    spec = SpecConfig(steps)
    memory = build_memory(needs, pool, spec.verify_tokens)
    config = EngineConfig(max_batch_tokens=batch_tokens)
    return EngineCore(role, pair.target, draft if steps else None, memory, spec, config, pool)


def _requests() -> list[Request]:
    return [request(f"r{n}", prompt_of(n), seed=n, max_tokens=OUTPUT) for n in LENGTHS]


@functools.cache
def _plain(family: str = QWEN3) -> dict[RequestId, Story]:
    return run_all(_core(family=family, steps=0), _requests())


def _truth(family: str = QWEN3) -> dict[RequestId, list[int]]:
    plain = _plain(family)
    return {r.request_id: [*r.prompt, *plain[r.request_id].tokens] for r in _requests()}


def _tokens(stories: Mapping[RequestId, Story]) -> dict[RequestId, list[int]]:
    return {name: story.tokens for name, story in stories.items()}


def _always(_: int) -> bool:
    return True


def _never(_: int) -> bool:
    return False


def _even(position: int) -> bool:
    return position % 2 == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("batch_tokens", [512, 24, 5])
def test_a_random_draft_changes_no_token(family: str, batch_tokens: int) -> None:
    stories = run_all(_core(family=family, batch_tokens=batch_tokens), _requests())
    assert _tokens(stories) == _tokens(_plain(family))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("right", "accepted"),
    # 14 tokens: the first comes from the prompt, then 5 a step, and the last step is capped.
    [(_always, [None, 4, 4, 2]), (_never, [None] + [0] * 12 + [None]), (_even, None)],
)
def test_known_drafts_change_no_token(
    family: str, right: Callable[[int], bool], accepted: list[int | None] | None
) -> None:
    draft = SpyDraft(_pair(family), _truth(family), right)
    stories = run_all(_core(draft=draft, family=family), _requests())
    assert _tokens(stories) == _tokens(_plain(family))
    if accepted is not None:
        assert all(story.accepted == accepted for story in stories.values())
    else:
        assert {0, 1} <= {n for story in stories.values() for n in story.accepted}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_block_is_that_of_a_fresh_draft_over_the_committed_tokens(family: str) -> None:
    """The whole prompt and all accepted tokens are context, and the newest token is the anchor."""
    pair, truth = _pair(family), _truth(family)
    spy = SpyDraft(pair)
    run_all(_core(draft=spy, family=family, batch_tokens=24), _requests())
    for (name, kv_len), logits_SV in spy.blocks.items():
        memory = memory_of(pair)
        fresh = opened(memory, name)
        inject(pair, memory, fresh, truth[name], (kv_len,))
        expected = pair.draft.block([fresh], [truth[name][kv_len]], memory).logits_BSV[0]
        assert (logits_SV - expected).abs().max() < 1e-4, (name, kv_len)


def test_a_prompt_read_in_chunks_drafts_what_a_whole_one_does() -> None:
    """Every prompt row feeds the draft: a lost one would leave NaN, or another block."""
    whole, chunked = SpyDraft(_pair()), SpyDraft(_pair())
    run_all(_core(draft=whole), _requests())
    run_all(_core(draft=chunked, batch_tokens=7), _requests())
    _same_blocks(whole, chunked)


def _same_blocks(one: SpyDraft, other: SpyDraft) -> None:
    assert one.blocks
    assert one.blocks.keys() == other.blocks.keys()
    for key, logits_SV in one.blocks.items():
        assert torch.isfinite(logits_SV).all(), key
        assert (other.blocks[key] - logits_SV).abs().max() < 1e-4, key


def _disaggregated(
    prefill: EngineCore, decode: EngineCore, *, with_draft: bool = True
) -> dict[RequestId, Story]:
    """Prefill, copy live rows chunk by chunk is the transfer's business: here once, then decode."""
    stories: dict[RequestId, Story] = {}
    ready: dict[RequestId, ChunkReady] = {}

    def on_chunk(chunk: ChunkReady) -> None:
        ready[chunk.request_id] = chunk

    for one in _requests():
        prefill.submit(one, on_chunk)
        decode.submit(one)
    run_until_idle(prefill)
    reserved = {o.request_id: o.reservation for o in run_until_idle(decode)}  # type: ignore[union-attr]
    for one in _requests():
        chunk = ready[one.request_id]
        tables = reserved[one.request_id].tables
        length = len(one.prompt)
        copy_state(
            prefill.memory, chunk.tables, decode.memory, tables, length, with_draft=with_draft
        )
        assert chunk.first_token is not None
        decode.adopt(one.request_id, chunk.first_token, with_draft)
        prefill.release(one.request_id)
    tell(stories, run_until_idle(decode))
    assert prefill.memory.at_baseline()
    assert decode.memory.at_baseline()
    return stories


@pytest.mark.parametrize("family", FAMILIES)
def test_disaggregated_equals_aggregated_token_for_token_and_block_for_block(family: str) -> None:
    here, there = SpyDraft(_pair(family)), SpyDraft(_pair(family))
    aggregated = run_all(_core(draft=here, family=family), _requests())
    prefill = _core(Role.PREFILL, SpyDraft(_pair(family)), family=family, batch_tokens=11)
    moved = _disaggregated(prefill, _core(Role.DECODE, there, family=family))
    assert _tokens(moved) == _tokens(aggregated)
    assert [s.accepted for s in moved.values()] == [s.accepted for s in aggregated.values()]
    _same_blocks(here, there)


def test_a_withheld_context_changes_drafts_and_nothing_else() -> None:
    """Rows that never came are NaN here; the draft goes on from what decode has seen itself."""
    spy = SpyDraft(_pair())
    moved = _disaggregated(
        _core(Role.PREFILL, SpyDraft(_pair())), _core(Role.DECODE, spy), with_draft=False
    )
    assert _tokens(moved) == _tokens(_plain())
    assert all(torch.isfinite(logits_SV).all() for logits_SV in spy.blocks.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_retracted_between_any_two_steps_nothing_changes(family: str) -> None:
    """The draft's context comes back with the rest: its blocks would show a missing or moved row."""
    calm, disturbed = SpyDraft(_pair(family)), SpyDraft(_pair(family))
    expected = run_all(_core(draft=calm, family=family), _requests())
    core = _core(draft=disturbed, family=family)
    for one in _requests():
        core.submit(one)
    stories: dict[RequestId, Story] = {}
    while core.step() or core.stats().retracted:
        tell(stories, core.drain())
        for one in reversed(_requests()):
            if stories[one.request_id].finish is None:
                core.retract(one.request_id)
    tell(stories, core.drain())
    assert stories == expected
    assert core.stats().retractions >= len(LENGTHS)
    assert core.memory.at_baseline()
    _same_blocks(calm, disturbed)


def test_a_checkpoint_folder_with_a_draft_inside_becomes_an_engine(tmp_path: Path) -> None:
    pair = _pair()
    _save(tmp_path, TARGET_CONFIG, pair.target_tensors)
    _save(tmp_path / "dspark", pair.raw, pair.tensors)
    core = build_engine(tmp_path, Role.AGGREGATED, pool_config(), SpecConfig(BLOCK), EngineConfig())
    assert core.layout().spec.algorithm == "dspark"
    assert _tokens(run_all(core, _requests())) == _tokens(_plain())
    plain = build_engine(tmp_path, Role.AGGREGATED, pool_config(), SpecConfig(0), EngineConfig())
    assert plain.layout().spec.algorithm == "none"
    assert not plain.memory.has("draft.kv")


def _save(folder: Path, raw: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(tensors), folder / "model.safetensors")


def test_the_layout_says_dspark() -> None:
    core = _core()
    layout = core.layout()
    assert layout.spec.algorithm == "dspark"
    assert (layout.spec.steps, layout.spec.draft_tokens) == (BLOCK, BLOCK + 1)
    assert layout.spec.draft_ratios == (1, 1)
    assert layout.spec.draft_digest == _pair().draft.digest
    assert layout.components[-1].name == "draft.kv"
    assert _core(steps=0).layout().spec.algorithm == "none"


def test_steps_that_are_not_the_block_stop_the_start() -> None:
    with pytest.raises(ConfigError, match=r"3 steps .*block_size is 4"):
        _core(steps=3)
