"""The target's choices for a whole step's logits: greedy rows by argmax, sampled requests by their
distribution.

Suffixes: R logit rows of the step, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from sluice.spec.distribution import distribution, is_greedy, pick
from sluice.spec.draft import Proposal
from sluice.spec.draws import Purpose, uniform
from sluice.spec.verify import Verdict, VerifyDraws, verify_greedy, verify_sampled
from sluice.types import Sampling


class StepSampler:
    """Chooses tokens from one step's logits. Whose rows are where is the caller's business."""

    def __init__(self, logits_RV: Tensor) -> None:
        self._logits_RV = logits_RV
        self._argmax: list[int] = logits_RV.argmax(dim=-1).tolist()

    def first_token(self, row: int, position: int, sampling: Sampling) -> int:
        """The token at ``position`` after a prompt, whose last logits are ``row``."""
        if is_greedy(sampling):
            return self._argmax[row]
        p_1V = distribution(self._logits_RV[row : row + 1], [sampling])
        return pick(p_1V, [uniform(sampling.seed, position, Purpose.TARGET)])[0]

    def verify(
        self, first_row: int, first_position: int, proposal: Proposal, sampling: Sampling
    ) -> Verdict:
        """Check drafts for ``first_position ..`` against rows ``first_row ..``; no drafts is a
        plain step.
        """
        drafts = proposal.token_ids
        stop_row = first_row + len(drafts) + 1
        if is_greedy(sampling):
            return verify_greedy(drafts, self._argmax[first_row:stop_row])
        p_SV = distribution(self._logits_RV[first_row:stop_row], [sampling] * (len(drafts) + 1))
        q_SV = p_SV[:0] if proposal.q_SV is None else proposal.q_SV
        draws = VerifyDraws.keyed(sampling.seed, first_position, len(drafts))
        return verify_sampled(drafts, p_SV, q_SV, draws)
