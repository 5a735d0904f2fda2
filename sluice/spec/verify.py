"""Which drafted tokens stand, and what follows them: pure functions over one request's step.

Suffixes: S drafted tokens, V vocabulary. Row i of the target's output is about the position of
draft i.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from sluice.spec.distribution import pick
from sluice.spec.draws import Purpose, uniform


@dataclass(frozen=True)
class Verdict:
    """``token_ids`` are the ``accepted`` drafts plus one token of the target's own."""

    accepted: int
    token_ids: tuple[int, ...]


def verify_greedy(drafts: Sequence[int], target_argmax: Sequence[int]) -> Verdict:
    """Accept drafts while they are what the target would have said; ``target_argmax`` has S + 1
    tokens.

    >>> verify_greedy([5, 6, 7], [5, 6, 9, 4])
    Verdict(accepted=2, token_ids=(5, 6, 9))
    """
    assert len(target_argmax) == len(drafts) + 1
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == target_argmax[accepted]:
        accepted += 1
    return Verdict(accepted, (*drafts[:accepted], target_argmax[accepted]))


@dataclass(frozen=True)
class VerifyDraws:
    """Uniforms of one verify step: one to accept and one to replace each draft, one for the bonus
    token.
    """

    accept: tuple[float, ...]
    residual: tuple[float, ...]
    bonus: float

    @classmethod
    def keyed(cls, seed: int, first_position: int, num_drafts: int) -> VerifyDraws:
        """Draws for drafts at ``first_position ..``; the bonus token's position follows the last
        draft's.
        """
        positions = range(first_position, first_position + num_drafts)
        return cls(
            accept=tuple(uniform(seed, p, Purpose.ACCEPT) for p in positions),
            residual=tuple(uniform(seed, p, Purpose.RESIDUAL) for p in positions),
            bonus=uniform(seed, positions.stop, Purpose.TARGET),
        )


def verify_sampled(
    drafts: Sequence[int], p_SV: Tensor, q_SV: Tensor, draws: VerifyDraws
) -> Verdict:
    """Lossless rejection sampling (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

    ``p_SV`` is the target's distribution, ``[S + 1, V]``; ``q_SV`` the one each draft was drawn
    from, ``[S, V]``. Draft i stands with probability min(1, p/q); the first rejected one is
    replaced by a draw from norm(max(p - q, 0)); if all stand, the bonus token comes from the last
    row of p.
    """
    assert p_SV.shape[0] == len(drafts) + 1
    for i, draft in enumerate(drafts):
        if draws.accept[i] * float(q_SV[i, draft]) < float(p_SV[i, draft]):
            continue
        residual_V = (p_SV[i] - q_SV[i]).clamp(min=0.0)
        if float(residual_V.sum()) <= 0.0:  # p == q up to rounding: either distribution will do
            residual_V = p_SV[i]
        replacement = pick(residual_V[None], [draws.residual[i]])[0]
        return Verdict(i, (*drafts[:i], replacement))
    bonus = pick(p_SV[-1:], [draws.bonus])[0]
    return Verdict(len(drafts), (*drafts, bonus))
