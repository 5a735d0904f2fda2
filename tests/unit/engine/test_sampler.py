"""Sampled output of the whole engine has the target's law, with a draft that is mostly wrong."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sluice.engine import sampler
from sluice.models.base import ForwardBatch, Segment
from sluice.pools.memory import build_memory
from sluice.spec.distribution import distribution, pick
from sluice.spec.draws import Purpose, uniform
from sluice.spec.verify import Verdict, VerifyDraws
from sluice.types import RequestId, Sampling
from tests.unit.engine.driving import run_all
from tests.unit.engine.toy_model import (
    TARGET_NEEDS,
    VOCAB,
    ToyTarget,
    pool_config,
    prompt_of,
    request,
    toy_core,
)

PROMPT = prompt_of(2)
SAMPLING = Sampling(temperature=0.8, top_k=9)
REQUESTS = 500


def _law_after(tokens: Sequence[int]) -> Tensor:
    """The target's distribution of the token after ``tokens``, by one plain forward."""
    memory = build_memory(TARGET_NEEDS, pool_config(), 1)
    tables = memory.open(RequestId("law"), len(tokens))
    memory.extend(tables, len(tokens))
    target = ToyTarget()
    segment = Segment(tables, 0, tuple(tokens))
    hidden = target.forward(ForwardBatch.build([segment], memory), memory)
    return distribution(target.logits(hidden[-1:]), [SAMPLING])[0]


def _p_value() -> float:
    """Fit of the second generated token, the first one that a draft proposes, over many seeds."""
    first = _law_after(PROMPT)
    law = sum(
        float(first[x]) * _law_after((*PROMPT, x)) for x in range(VOCAB) if float(first[x]) > 0
    )
    assert isinstance(law, Tensor)
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    core = toy_core()
    requests = [
        request(str(seed), PROMPT, max_tokens=3, seed=seed, temperature=0.8, top_k=9)
        for seed in range(REQUESTS)
    ]
    for start in range(0, REQUESTS, 250):
        for story in run_all(core, requests[start : start + 250]).values():
            counts[story.tokens[1]] += 1
    possible = law > 0
    assert float(counts[~possible].sum()) == 0
    expected = law[possible] / law.sum() * REQUESTS
    return float(chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


def test_engine_samples_from_the_targets_law() -> None:
    assert _p_value() > 0.01


def _accept_everything(
    drafts: Sequence[int], p_SV: Tensor, q_SV: Tensor, draws: VerifyDraws
) -> Verdict:
    return Verdict(len(drafts), (*drafts, pick(p_SV[-1:], [draws.bonus])[0]))


def test_a_biased_rule_in_the_engine_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Subtler biases are caught at the rule itself (``spec/test_verify``); this shows that it is in
    use.
    """
    monkeypatch.setattr(sampler, "verify_sampled", _accept_everything)
    assert _p_value() < 1e-6


def test_each_token_is_drawn_with_the_key_of_its_own_position() -> None:
    """Two positions that shared a draw would be correlated, which no test of one position's law can
    see.
    """
    core = toy_core(steps=0)
    for seed in range(25):
        one = request(str(seed), PROMPT, max_tokens=3, seed=seed, temperature=0.8, top_k=9)
        tokens = run_all(core, [one])[one.request_id].tokens
        known = list(PROMPT)
        for token in tokens:
            draw = uniform(seed, len(known), Purpose.TARGET)
            assert [token] == pick(_law_after(known)[None], [draw])
            known.append(token)
