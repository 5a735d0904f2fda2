"""The DSPARK draft against a naive re-implementation, cached against recomputed, and its edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sluice.errors import ConfigError
from sluice.models.base import ForwardBatch, Segment
from sluice.models.capture import HiddenCapture
from sluice.models.dspark.model import DSparkDraft
from sluice.models.dspark.state import DRAFT_KV
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory
from tests.unit.models.dspark.naive import NaiveDraft
from tests.unit.models.dspark.tiny import (
    BLOCK,
    TARGET_LAYERS,
    Pair,
    captured,
    inject,
    make_pair,
    make_target,
    memory_of,
    opened,
    prompt_of,
    shallower,
)

KINDS = ("vanilla", "gated", "rnn")
TOLERANCE = 1e-4


def _naive(pair: Pair) -> NaiveDraft:
    return NaiveDraft(
        pair.raw, pair.tensors, pair.target.embedding.rows, pair.target.vocabulary.rows
    )


def _corrected(pair: Pair, memory: Memory, tables: RequestTables, previous: list[int]) -> Tensor:
    """Logits ``[S, V]`` of a block whose drafts are given."""
    block = pair.draft.block([tables], [previous[0]], memory)
    chain = pair.draft.markov_chain(1)
    rows = [
        block.logits_BSV[:, s] + chain.step(torch.tensor([token]), block.hidden_BSD[:, s])
        for s, token in enumerate(previous)
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_block_logits_equal_the_naive_draft(kind: str, from_anchor: bool, causal: bool) -> None:
    pair = make_pair(markov_head_type=kind, sample_from_anchor=from_anchor, is_causal=causal)
    memory = memory_of(pair)
    tables = opened(memory, "a")
    streams = inject(pair, memory, tables, prompt_of(11), (11,))
    previous = [7, 3, 21, 9]
    naive = _naive(pair)
    expected = naive.corrected(naive.hidden(streams, previous[0]), previous)
    found = _corrected(pair, memory, tables, previous)
    assert found.shape == (BLOCK, len(pair.target.embedding.rows))
    assert (found.double() - torch.stack(expected)).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunks", [(13,), (1, 12), (5, 3, 5), (8, 5), (1,) * 13])
def test_context_read_in_chunks_equals_the_whole_prompt(chunks: tuple[int, ...]) -> None:
    pair = make_pair(markov_head_type="rnn")
    memory = memory_of(pair)
    tables = opened(memory, "a")
    inject(pair, memory, tables, prompt_of(13), chunks)
    whole = opened(memory, "b")
    streams = inject(pair, memory, whole, prompt_of(13), (13,))
    naive = _naive(pair)
    previous = [4, 4, 5, 6]
    expected = torch.stack(naive.corrected(naive.hidden(streams, 4), previous))
    assert (_corrected(pair, memory, tables, previous) - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("length", [1, 7, 8, 9])
def test_requests_drafted_together_get_what_they_get_alone(length: int) -> None:
    pair = make_pair()
    memory = memory_of(pair)
    tables = [opened(memory, name) for name in "abc"]
    for one, tokens in zip(tables, (length, 20, 2), strict=True):
        inject(pair, memory, one, prompt_of(tokens), (tokens,))
    together = pair.draft.block(tables, [1, 2, 3], memory).logits_BSV
    for i, one in enumerate(tables):
        alone = pair.draft.block([one], [i + 1], memory).logits_BSV
        assert (together[i] - alone[0]).abs().max() < TOLERANCE


def test_an_empty_context_drafts_from_the_anchor_alone() -> None:
    pair = make_pair()
    memory = memory_of(pair)
    tables = opened(memory, "a")
    naive = _naive(pair)
    expected = torch.stack(naive.corrected(naive.hidden(torch.zeros(0, 60), 5), [5, 6, 7, 8]))
    found = _corrected(pair, memory, tables, [5, 6, 7, 8])
    assert (found - expected).abs().max() < TOLERANCE


def test_rows_that_never_came_are_not_read() -> None:
    """The pages are filled with NaN; ``draft_valid_from`` says where the context really begins."""
    pair = make_pair()
    memory = memory_of(pair)
    tables = opened(memory, "a")
    ids = prompt_of(14)
    memory.extend(tables, 9)
    streams = [captured(pair, memory, [Segment(tables, 0, ids[:9])])]
    tables.kv_len = tables.draft_valid_from = 9
    streams.append(inject(pair, memory, tables, ids, (5,)))
    previous = [3, 2, 1, 2]
    found = _corrected(pair, memory, tables, previous)
    naive = _naive(pair)
    hidden = naive.hidden(torch.cat(streams), 3, first_context=9)
    assert (found - torch.stack(naive.corrected(hidden, previous))).abs().max() < TOLERANCE


def test_rejected_rows_never_become_context() -> None:
    """Verification runs past what is committed; only committed columns are injected and seen."""
    pair = make_pair()
    memory = memory_of(pair)
    tables, ids = opened(memory, "a"), prompt_of(12)
    inject(pair, memory, tables, ids, (8,))
    memory.extend(tables, 8 + 5)
    verified = Segment(tables, 8, (*ids[8:10], 17, 18, 19))
    streams = captured(pair, memory, [verified])
    kept = Segment(tables, 8, ids[8:10])
    pair.draft.inject(ForwardBatch.build([kept], memory), streams[:2], memory)
    tables.kv_len = 10
    fresh = opened(memory, "b")
    inject(pair, memory, fresh, ids, (10,))
    found, expected = (pair.draft.block([one], [6], memory).logits_BSV for one in (tables, fresh))
    assert (found - expected).abs().max() < TOLERANCE


def test_drafting_writes_no_state() -> None:
    pair = make_pair()
    memory = memory_of(pair)
    tables = opened(memory, "a")
    inject(pair, memory, tables, prompt_of(10), (10,))
    before = memory.arena().clone()
    pair.draft.block([tables], [3], memory)
    assert torch.equal(memory.arena(), before)


def test_captured_streams_are_those_after_each_layer_in_the_asked_order() -> None:
    pair = make_pair()
    memory = memory_of(pair)
    tables, ids = opened(memory, "a"), prompt_of(9)
    memory.extend(tables, 9)
    streams = captured(pair, memory, [Segment(tables, 0, ids)]).split(20, dim=-1)
    for stream, layer in zip(streams, (2, 0, 3), strict=True):
        cut = shallower(pair, layer + 1)
        other = opened(memory, f"cut{layer}")
        memory.extend(other, 9)
        batch = ForwardBatch.build([Segment(other, 0, ids)], memory)
        assert torch.equal(stream, cut.forward(batch, memory))


def test_reading_a_capture_before_the_forward_fails() -> None:
    with pytest.raises(AssertionError, match=r"never showed layers \[1\]"):
        HiddenCapture((1,)).hidden()


def test_state_is_one_trailing_component_numbered_after_the_targets_layers() -> None:
    pair = make_pair()
    memory = memory_of(pair)
    component = memory.components()[-1]
    assert component.name == DRAFT_KV
    assert [entry.layer_id for entry in component.entries] == [TARGET_LAYERS, TARGET_LAYERS + 1]
    assert component.entries[0].row_shape == (2, 2, 6)
    # 2 layers * 2 heads * (key + value) * 6 * 4 bytes for every token
    assert component.bytes_per_row == 192


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_target_layers": 5}, "num_target_layers is 5, its target .* has 4"),
        ({"vocab_size": 30}, "vocab_size is 30, its target .* has 29"),
        ({"hidden_size": 24}, "hidden_size is 24, its target .* has 20"),
        ({"target_hidden_size": 24}, "target_hidden_size is 24, its target .* has 20"),
    ],
)
def test_a_draft_of_another_target_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_pair(**change)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_is_a_probability_per_position(with_markov: bool) -> None:
    temperatures = [1.0, 2.0, 0.5, 1.5]
    pair = make_pair(
        enable_confidence_head=True,
        confidence_head_with_markov=with_markov,
        confidence_temperatures=temperatures,
    )
    hidden = torch.randn(1, BLOCK, 20, generator=torch.Generator().manual_seed(3))
    previous = torch.tensor([[4, 8, 15, 16]])
    found = pair.draft.confidence(hidden, previous)
    assert found is not None
    t = pair.tensors
    for s, temperature in enumerate(temperatures):
        features = [hidden[0, s]]
        if with_markov:
            features.append(t["markov_head.markov_w1.weight"][previous[0, s]])
        raw = t["confidence_head.proj.weight"][0] @ torch.cat(features)
        expected = torch.sigmoid((raw + t["confidence_head.proj.bias"][0]) / temperature)
        assert float(found[0, s]) == pytest.approx(float(expected), abs=1e-6)


def test_without_a_confidence_head_there_is_no_confidence() -> None:
    pair: Pair = make_pair()
    assert isinstance(pair.draft, DSparkDraft)
    assert pair.draft.confidence(torch.zeros(1, 4, 20), torch.zeros(1, 4).long()) is None
    assert make_target()[0].num_layers == TARGET_LAYERS
