"""Sampled output of the whole engine has the target's law, with a draft that is mostly wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sluice.engine import sampler
from sluice.models.base import ForwardBatch, Segment
from sluice.pools.memory import build_memory
from sluice.spec.distribution import distribution, pick
from sluice.spec.draws import Purpose, uniform
from sluice.spec.steering import Steering, TokenCounts
from sluice.spec.verify import Verdict, VerifyDraws
from sluice.types import Request, RequestId, Sampling
from tests.unit.engine.driving import run_all
from tests.unit.engine.toy_model import (
    MODULUS,
    TARGET_NEEDS,
    VOCAB,
    ToyDraft,
    ToyTarget,
    pool_config,
    prompt_of,
    request,
    toy_core,
)

PROMPT = prompt_of(2)
SAMPLING = Sampling(temperature=0.8, top_k=9, max_tokens=4, ignore_eos=True)
PENALISED = replace(
    SAMPLING,
    temperature=1.5,
    frequency_penalty=1.5,
    presence_penalty=0.8,
    repetition_penalty=1.2,
    min_p=0.01,
)
FLAT = torch.zeros(MODULUS, VOCAB)  # a draft that guesses, so that any token may be an accepted one
REQUESTS = 500


def _law_after(tokens: Sequence[int], sampling: Sampling = SAMPLING) -> Tensor:
    """The target's distribution of the token after ``tokens``, by one plain forward."""
    memory = build_memory(TARGET_NEEDS, pool_config(), 1)
    tables = memory.open(RequestId("law"), len(tokens))
    memory.extend(tables, len(tokens))
    target = ToyTarget()
    segment = Segment(tables, 0, tuple(tokens))
    hidden = target.forward(ForwardBatch.build([segment], memory), memory)
    steering = Steering(sampling, PROMPT, tokens[len(PROMPT) :], frozenset())
    return distribution(steering.steer(target.logits(hidden[-1:]), ()), [sampling])[0]


def _tokens(sampling: Sampling, draft: ToyDraft | None = None) -> list[list[int]]:
    """Answers to ``REQUESTS`` seeds. The second token of each is the first one that a draft proposes; the third
    may stand behind an accepted draft.
    """
    core = toy_core(draft=draft)
    requests = [
        Request(RequestId(str(seed)), PROMPT, replace(sampling, seed=seed))
        for seed in range(REQUESTS)
    ]
    answers = []
    for start in range(0, REQUESTS, 250):
        answers += [s.tokens for s in run_all(core, requests[start : start + 250]).values()]
    return answers


def _p_value() -> float:
    """Fit of the second generated token over many seeds."""
    first = _law_after(PROMPT)
    law = sum(
        float(first[x]) * _law_after((*PROMPT, x)) for x in range(VOCAB) if float(first[x]) > 0
    )
    assert isinstance(law, Tensor)
    counts = torch.zeros(VOCAB, dtype=torch.float64)
    for tokens in _tokens(SAMPLING):
        counts[tokens[1]] += 1
    possible = law > 0
    assert float(counts[~possible].sum()) == 0
    expected = law[possible] / law.sum() * REQUESTS
    return float(chisquare(counts[possible].numpy(), expected.numpy()).pvalue)


def test_engine_samples_from_the_targets_law() -> None:
    assert _p_value() > 0.01


def _repeats_of_the_law() -> float:
    """Probability that the third token is the second one again, with penalties against it."""
    total = 0.0
    for x, p_x in enumerate(_law_after(PROMPT, PENALISED).tolist()):
        second = _law_after((*PROMPT, x), PENALISED).tolist() if p_x > 0 else []
        for y, p_y in enumerate(second):
            if p_y > 0:
                total += p_x * p_y * float(_law_after((*PROMPT, x, y), PENALISED)[y])
    return total


def _p_value_of_repeats(law: float) -> float:
    repeats = sum(tokens[1] == tokens[2] for tokens in _tokens(PENALISED, ToyDraft(FLAT)))
    expected = [law * REQUESTS, (1 - law) * REQUESTS]
    return float(chisquare([repeats, REQUESTS - repeats], expected).pvalue)


def test_behind_drafts_it_samples_from_the_penalised_law() -> None:
    assert _p_value_of_repeats(_repeats_of_the_law()) > 0.01


def test_penalties_that_miss_the_drafts_before_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: TokenCounts, drafts: Sequence[int]) -> Tensor:
        return self._output_V.repeat(len(drafts) + 1, 1)

    law = _repeats_of_the_law()
    monkeypatch.setattr(TokenCounts, "rows", forgetful)
    assert _p_value_of_repeats(law) < 1e-4


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
