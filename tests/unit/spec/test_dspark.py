"""Block drafting: drafts, their exact distributions, shortened proposals, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sluice.errors import ConfigError
from sluice.models.base import Segment
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory
from sluice.spec.distribution import distribution, pick
from sluice.spec.draft import DraftTask
from sluice.spec.draws import Purpose, uniform
from sluice.spec.dspark import DSparkDrafter
from sluice.spec.planner import StaticPlanner
from sluice.types import Sampling
from tests.unit.models.dspark.naive import NaiveDraft
from tests.unit.models.dspark.tiny import (
    BLOCK,
    Pair,
    captured,
    inject,
    make_pair,
    memory_of,
    opened,
    prompt_of,
)

KINDS = ("vanilla", "gated", "rnn")
WARM = Sampling(temperature=0.8, top_k=12, top_p=0.9, seed=5)


class _Running:
    """One request behind its prompt, and all streams the draft has seen of it."""

    def __init__(self, pair: Pair, memory: Memory, name: str, length: int) -> None:
        self.tables: RequestTables = opened(memory, name)
        self.streams: Tensor = inject(pair, memory, self.tables, prompt_of(length), (length,))

    def task(self, sampling: Sampling, anchor: int, steps: int = BLOCK) -> DraftTask:
        return DraftTask(self.tables, steps, sampling, newest_token=anchor)


def _naive(pair: Pair) -> NaiveDraft:
    return NaiveDraft(
        pair.raw, pair.tensors, pair.target.embedding.rows, pair.target.vocabulary.rows
    )


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_drafts_equal_the_naive_draft(kind: str) -> None:
    pair = make_pair(markov_head_type=kind)
    memory = memory_of(pair)
    drafter = DSparkDrafter(pair.draft, memory, BLOCK)
    running = [_Running(pair, memory, name, n) for name, n in (("a", 1), ("b", 9), ("c", 17))]
    proposals = drafter.propose([one.task(Sampling(), 3 + i) for i, one in enumerate(running)])
    naive = _naive(pair)
    expected = [naive.greedy(one.streams, 3 + i) for i, one in enumerate(running)]
    assert [list(p.token_ids) for p in proposals] == expected
    assert all(p.q_SV is None for p in proposals)
    assert len({tuple(tokens) for tokens in expected}) == 3, "the test must tell requests apart"


def test_the_markov_head_decides_drafts() -> None:
    """Without the correction the drafts would differ, so the tests above see it."""
    pair = make_pair()
    memory = memory_of(pair)
    one = _Running(pair, memory, "a", 9)
    drafts = DSparkDrafter(pair.draft, memory, BLOCK).propose([one.task(Sampling(), 3)])[0]
    bare = pair.draft.block([one.tables], [3], memory).logits_BSV[0].argmax(dim=-1)
    assert list(drafts.token_ids) != bare.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_each_sampled_draft_comes_with_the_distribution_it_was_drawn_from(kind: str) -> None:
    """q of draft j is conditional on drafts before it: rejection sampling needs exactly that one."""
    pair = make_pair(markov_head_type=kind)
    memory = memory_of(pair)
    drafter = DSparkDrafter(pair.draft, memory, BLOCK)
    warm, cold = _Running(pair, memory, "a", 10), _Running(pair, memory, "b", 3)
    proposal, greedy = drafter.propose([warm.task(WARM, 3), cold.task(Sampling(), 4)])
    naive = _naive(pair)
    assert list(greedy.token_ids) == naive.greedy(cold.streams, 4)
    assert greedy.q_SV is None
    assert proposal.q_SV is not None
    logits = naive.corrected(naive.hidden(warm.streams, 3), [3, *proposal.token_ids])
    expected_SV = distribution(torch.stack(logits), [WARM] * BLOCK)
    assert (proposal.q_SV - expected_SV).abs().max() < 1e-5
    positions = range(11, 11 + BLOCK)  # the anchor stands at 10
    draws = [uniform(WARM.seed, p, Purpose.DRAFT) for p in positions]
    assert list(proposal.token_ids) == pick(proposal.q_SV, draws)


@pytest.mark.parametrize("sampling", [Sampling(), WARM])
def test_fewer_steps_keep_the_blocks_start(sampling: Sampling) -> None:
    pair = make_pair(markov_head_type="rnn")
    memory = memory_of(pair)
    drafter = DSparkDrafter(pair.draft, memory, BLOCK)
    running = [_Running(pair, memory, name, 8) for name in "abcd"]
    whole = drafter.propose([running[0].task(sampling, 5)])[0]
    limits = (0, 3, 1, BLOCK)
    tasks = [one.task(sampling, 5, steps) for one, steps in zip(running, limits, strict=True)]
    for proposal, steps in zip(drafter.propose(tasks), limits, strict=True):
        assert proposal.token_ids == whole.token_ids[:steps]
        if steps and whole.q_SV is not None:
            assert proposal.q_SV is not None
            assert (proposal.q_SV - whole.q_SV[:steps]).abs().max() < 1e-5
    assert [p.token_ids for p in drafter.propose([running[0].task(sampling, 5, 0)])] == [()]


def test_observed_rows_become_context() -> None:
    pair = make_pair()
    memory = memory_of(pair)
    drafter = DSparkDrafter(pair.draft, memory, BLOCK)
    assert drafter.captured_layers == (2, 0, 3)
    one, ids = _Running(pair, memory, "a", 6), prompt_of(6)
    memory.extend(one.tables, 9)
    segment = Segment(one.tables, 6, (4, 9, 2))
    streams = captured(pair, memory, [segment])
    drafter.observe([Segment(one.tables, 6, (9, 2, 8))], streams)
    one.tables.kv_len = 9
    expected = _naive(pair).greedy(torch.cat((one.streams, streams)), 8)
    proposal = drafter.propose([one.task(Sampling(), 8)])[0]
    assert list(proposal.token_ids) == expected
    assert len(ids) == 6


class _OneDraft:
    """A planner that looks at the first draft's confidence and cuts the rest."""

    wants_confidence = True

    def __init__(self) -> None:
        self.seen: list[Tensor | None] = []

    def lengths(self, confidence_BS: Tensor | None, limits: Sequence[int]) -> list[int]:
        self.seen.append(confidence_BS)
        return [min(limit, 1) for limit in limits]


def test_a_planner_may_shorten_and_sees_confidence() -> None:
    pair = make_pair(enable_confidence_head=True, confidence_head_with_markov=True)
    memory = memory_of(pair)
    planner = _OneDraft()
    one = _Running(pair, memory, "a", 8)
    proposal = DSparkDrafter(pair.draft, memory, BLOCK, planner).propose([one.task(WARM, 5)])[0]
    whole = DSparkDrafter(pair.draft, memory, BLOCK).propose([one.task(WARM, 5)])[0]
    assert proposal.token_ids == whole.token_ids[:1]
    assert proposal.q_SV is not None
    assert proposal.q_SV.shape[0] == 1
    confidence = planner.seen[0]
    assert confidence is not None
    block = pair.draft.block([one.tables], [5], memory)
    previous = torch.tensor([[5, *whole.token_ids[:-1]]])
    expected = pair.draft.confidence(block.hidden_BSD, previous)
    assert expected is not None
    assert torch.allclose(confidence, expected)


def test_the_static_planner_takes_every_draft() -> None:
    assert StaticPlanner().lengths(torch.zeros(2, 4), [4, 2]) == [4, 2]


def test_steps_that_are_not_the_block_are_refused() -> None:
    pair = make_pair()
    with pytest.raises(ConfigError, match=r"3 steps .*block_size is 4"):
        DSparkDrafter(pair.draft, memory_of(pair), 3)
