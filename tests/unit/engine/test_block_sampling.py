"""Sampled block drafts leave the target's distribution alone: counted over many requests."""

from __future__ import annotations

from collections import Counter

import torch

from sluice.config import EngineConfig, SpecConfig
from sluice.engine.core import EngineCore
from sluice.models.base import ForwardBatch, Segment
from sluice.pools.memory import build_memory
from sluice.spec.distribution import distribution
from sluice.types import RequestId, Role, Sampling
from tests.unit.engine.driving import run_all
from tests.unit.engine.toy_model import request
from tests.unit.models.dspark.tiny import BLOCK, Pair, make_target, memory_of, pair_on, pool_config

REQUESTS, VOCAB = 500, 4  # few tokens, so that target and draft often mean the same ones
PROMPT = (1, 2, 0, 2)
SHAPE = {"temperature": 5.0}
CRITICAL = 103.4  # the 99.9 % point of chi-square with 63 degrees of freedom (4^3 sequences)


def _exact(pair: Pair) -> dict[tuple[int, ...], float]:
    """Probability of each continuation of three tokens, from the target alone."""
    found: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        grown: dict[tuple[int, ...], float] = {}
        for tokens, weight in found.items():
            for token, p in _next(pair, tokens).items():
                grown[*tokens, token] = weight * p
        found = grown
    return found


def _next(pair: Pair, tokens: tuple[int, ...]) -> dict[int, float]:
    memory = memory_of(pair)
    tables = memory.open(RequestId("exact"), 20)
    memory.extend(tables, len(PROMPT) + len(tokens))
    batch = ForwardBatch.build([Segment(tables, 0, PROMPT + tokens)], memory)
    logits = pair.target.logits(pair.target.forward(batch, memory)[-1:])
    p_V = distribution(logits, [Sampling(**SHAPE)])[0]  # type: ignore[arg-type]
    return {int(token): float(p_V[token]) for token in torch.nonzero(p_V)[:, 0]}


def _counted(pair: Pair) -> tuple[Counter[tuple[int, ...]], int]:
    """First three tokens of many requests, each with its own seed, and how many drafts stood."""
    pool = pool_config()
    needs = pair.target.state_needs("float32") + pair.draft.state_needs("float32")
    memory = build_memory(needs, pool, BLOCK + 1)
    config = EngineConfig(max_queue=REQUESTS, max_running=12)
    core = EngineCore(
        Role.AGGREGATED, pair.target, pair.draft, memory, SpecConfig(BLOCK), config, pool
    )
    requests = [
        request(f"r{seed}", PROMPT, seed=seed, max_tokens=4, **SHAPE) for seed in range(REQUESTS)
    ]
    stories = run_all(core, requests).values()
    accepted = sum(count or 0 for story in stories for count in story.accepted)
    return Counter(tuple(story.tokens[:3]) for story in stories), accepted


def test_sampled_block_drafts_leave_the_targets_distribution_alone() -> None:
    target, _ = make_target(vocab_size=VOCAB)
    pair = pair_on(target, markov_head_type="gated", vocab_size=VOCAB, mask_token_id=3)
    expected, (counted, accepted) = _exact(pair), _counted(pair)
    assert len(expected) == VOCAB**3
    assert set(counted) <= set(expected)
    statistic = sum(
        (counted[tokens] - REQUESTS * p) ** 2 / (REQUESTS * p) for tokens, p in expected.items()
    )
    assert statistic < CRITICAL
    # Many drafts stood and many fell, so both ways to a token were taken.
    assert REQUESTS // 2 < accepted < 2 * REQUESTS
