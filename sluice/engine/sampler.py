"""The target's choices for a whole step's logits: greedy rows by argmax, sampled requests by their
distribution, steered ones after steering; and what the chosen tokens were worth.

Suffixes: R logit rows of the step, S drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sluice.spec.distribution import distribution, is_greedy, pick
from sluice.spec.draft import Proposal
from sluice.spec.draws import Purpose, uniform
from sluice.spec.logprobs import score
from sluice.spec.steering import Steering
from sluice.spec.verify import Verdict, VerifyDraws, verify_greedy, verify_sampled
from sluice.types import Logprobs, Sampling


class StepSampler:
    """Chooses tokens from one step's logits. Whose rows are where is the caller's business."""

    def __init__(self, logits_RV: Tensor) -> None:
        self._logits_RV = logits_RV
        self._argmax: list[int] = logits_RV.argmax(dim=-1).tolist()

    def first_token(
        self, row: int, position: int, sampling: Sampling, steering: Steering | None = None
    ) -> int:
        """The token at ``position`` after a prompt, whose last logits are ``row``."""
        if steering is None and is_greedy(sampling):
            return self._argmax[row]
        logits_1V = self._steered(row, (), steering)
        if is_greedy(sampling):
            return int(logits_1V.argmax())
        p_1V = distribution(logits_1V, [sampling])
        return pick(p_1V, [uniform(sampling.seed, position, Purpose.TARGET)])[0]

    def verify(
        self,
        first_row: int,
        first_position: int,
        proposal: Proposal,
        sampling: Sampling,
        steering: Steering | None = None,
    ) -> Verdict:
        """Check drafts for ``first_position ..`` against rows ``first_row ..``; no drafts is a
        plain step.
        """
        drafts = proposal.token_ids
        if steering is None and is_greedy(sampling):
            return verify_greedy(drafts, self._argmax[first_row : first_row + len(drafts) + 1])
        logits_SV = self._steered(first_row, drafts, steering)
        if is_greedy(sampling):
            return verify_greedy(drafts, logits_SV.argmax(dim=-1).tolist())
        p_SV = distribution(logits_SV, [sampling] * (len(drafts) + 1))
        q_SV = p_SV[:0] if proposal.q_SV is None else proposal.q_SV
        draws = VerifyDraws.keyed(sampling.seed, first_position, len(drafts))
        return verify_sampled(drafts, p_SV, q_SV, draws)

    def logprobs(
        self, first_row: int, token_ids: Sequence[int], sampling: Sampling
    ) -> tuple[Logprobs, ...]:
        """Of ``token_ids``, chosen from rows ``first_row ..``; empty unless they were asked for."""
        if sampling.logprobs is None:
            return ()
        rows_SV = self._logits_RV[first_row : first_row + len(token_ids)]
        return score(rows_SV, token_ids, sampling.logprobs)

    def _steered(self, first_row: int, drafts: Sequence[int], steering: Steering | None) -> Tensor:
        logits_SV = self._logits_RV[first_row : first_row + len(drafts) + 1]
        return logits_SV if steering is None else steering.steer(logits_SV, drafts)
