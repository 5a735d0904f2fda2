"""Acceptance rules: greedy cases, and the law of rejection sampling against biased variants that must fail."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from sluice.spec.distribution import pick
from sluice.spec.draws import Purpose, uniform
from sluice.spec.verify import Verdict, VerifyDraws, verify_greedy, verify_sampled

Rule = Callable[[Sequence[int], Tensor, Tensor, VerifyDraws], Verdict]


@pytest.mark.parametrize(
    ("drafts", "said", "expected"),
    [
        ([], [4], Verdict(0, (4,))),
        ([1, 2, 3], [1, 2, 3, 4], Verdict(3, (1, 2, 3, 4))),
        ([1, 2, 3], [9, 2, 3, 4], Verdict(0, (9,))),
        ([1, 2, 3], [1, 9, 3, 4], Verdict(1, (1, 9))),
        ([1, 2, 3], [1, 2, 9, 4], Verdict(2, (1, 2, 9))),
    ],
)
def test_greedy_keeps_the_agreeing_prefix(
    drafts: list[int], said: list[int], expected: Verdict
) -> None:
    assert verify_greedy(drafts, said) == expected


def test_sampled_with_point_masses_is_greedy() -> None:
    eye = torch.eye(5, dtype=torch.float64)
    for said in ([1, 2, 3, 4], [1, 0, 3, 4], [0, 2, 3, 4]):
        drafts = [1, 2, 3]
        draws = VerifyDraws.keyed(5, 10, 3)
        assert verify_sampled(drafts, eye[said], eye[drafts], draws) == verify_greedy(drafts, said)


def test_no_drafts_is_a_plain_draw_with_the_target_key() -> None:
    p = torch.tensor([[0.2, 0.3, 0.5]], dtype=torch.float64)
    for seed in range(20):
        verdict = verify_sampled([], p, p[:0], VerifyDraws.keyed(seed, 4, 0))
        assert verdict == Verdict(0, (pick(p, [uniform(seed, 4, Purpose.TARGET)])[0],))


def test_equal_distributions_accept_everything() -> None:
    p = torch.softmax(torch.randn(4, 6, generator=torch.Generator().manual_seed(1)), -1).double()
    for seed in range(50):
        drafts = pick(p[:3], [uniform(seed, i, Purpose.DRAFT) for i in range(3)])
        assert verify_sampled(drafts, p, p[:3], VerifyDraws.keyed(seed, 0, 3)).accepted == 3


def _accept_everything(
    drafts: Sequence[int], p_SV: Tensor, q_SV: Tensor, draws: VerifyDraws
) -> Verdict:
    return Verdict(len(drafts), (*drafts, pick(p_SV[-1:], [draws.bonus])[0]))


def _resample_from_p(
    drafts: Sequence[int], p_SV: Tensor, q_SV: Tensor, draws: VerifyDraws
) -> Verdict:
    verdict = verify_sampled(drafts, p_SV, q_SV, draws)
    if (i := verdict.accepted) < len(drafts):
        return Verdict(i, (*drafts[:i], pick(p_SV[i : i + 1], [draws.residual[i]])[0]))
    return verdict


def _accept_by_p_alone(
    drafts: Sequence[int], p_SV: Tensor, q_SV: Tensor, draws: VerifyDraws
) -> Verdict:
    return verify_sampled(drafts, p_SV, torch.ones_like(q_SV), draws)


VOCAB, DRAWS = 5, 4000


def _fit(rule: Rule) -> tuple[float, float]:
    """p-values of the first token, and of the second given that there is one, over many seeds.

    The two positions' distributions don't depend on the tokens before, so both laws are known exactly.
    """
    generator = torch.Generator().manual_seed(3)
    p = torch.softmax(torch.randn(3, VOCAB, generator=generator).double(), -1)
    q = torch.softmax(torch.randn(2, VOCAB, generator=generator).double(), -1)
    counts = torch.zeros(2, VOCAB, dtype=torch.float64)
    for seed in range(DRAWS):
        drafts = pick(q, [uniform(seed, i, Purpose.DRAFT) for i in range(2)])
        for i, token in enumerate(rule(drafts, p, q, VerifyDraws.keyed(seed, 0, 2)).token_ids[:2]):
            counts[i, token] += 1
    first, second = (
        float(chisquare(counts[i].numpy(), (p[i] * counts[i].sum()).numpy()).pvalue)
        for i in range(2)
    )
    return first, second


def test_rejection_sampling_has_exactly_the_targets_law() -> None:
    first, second = _fit(verify_sampled)
    assert first > 0.01
    assert second > 0.01


@pytest.mark.parametrize("rule", [_accept_everything, _resample_from_p, _accept_by_p_alone])
def test_biased_rules_fail_the_same_test(rule: Rule) -> None:
    first, _ = _fit(rule)
    assert first < 1e-6
