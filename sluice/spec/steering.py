"""What shapes a request's logits besides the model, position by position, in vLLM's order:

1. grammar: tokens that leave it become -inf
2. ``min_tokens``: so do tokens that would end the answer, until so many have been emitted
3. ``logit_bias`` is added
4. ``repetition_penalty``, for tokens of prompt and output
5. ``frequency_penalty`` and ``presence_penalty``, for tokens of the output

``spec.distribution`` goes on from there with temperature, min-p, top-k and top-p; a greedy request takes the
largest of these logits. Only the target is steered: a draft's proposals keep the distribution they were drawn
from, so verification stays lossless.

Suffixes: R rows of one request (draft i is row i's candidate), V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.errors import SluiceError
from sluice.grammar.matcher import Matcher
from sluice.types import Sampling


class Steering:
    """One request's. ``output`` is the request's own list, which grows; everything is derived from it, so a
    token counts once whether it was made here or came from another pod.
    """

    def __init__(
        self,
        sampling: Sampling,
        prompt: Sequence[int],
        output: Sequence[int],
        stop_ids: frozenset[int],
        matcher: Matcher | None = None,
    ) -> None:
        self._sampling = sampling
        self._prompt = prompt
        self._output = output
        self._stop_ids = sorted(stop_ids)
        self._matcher = matcher
        self._counts: TokenCounts | None = None

    @property
    def failure(self) -> SluiceError | None:
        """Why the request can't go on, known after ``steer``."""
        return None if self._matcher is None else self._matcher.failure

    def steer(self, logits_RV: Tensor, drafts: Sequence[int]) -> Tensor:
        """Float32 logits of the positions after the output, the i-th of them behind the drafts before i.

        Changes neither its argument nor, whatever becomes of the drafts, what the next call says.
        """
        assert logits_RV.shape[0] == len(drafts) + 1
        steered_RV = logits_RV.to(torch.float32)
        if self._matcher is not None:
            self._matcher.follow(self._output)
            allowed_RV = self._matcher.allowed(drafts).to(logits_RV.device)
            steered_RV = steered_RV.masked_fill(~allowed_RV, float("-inf"))
        early = min(self._sampling.min_tokens - len(self._output), len(steered_RV))
        if early > 0:
            steered_RV = torch.cat([forbid(steered_RV[:early], self._stop_ids), steered_RV[early:]])
        if self._sampling.logit_bias:
            steered_RV = add_bias(steered_RV, self._sampling.logit_bias)
        return self._penalise(steered_RV, drafts) if penalises(self._sampling) else steered_RV

    def _penalise(self, logits_RV: Tensor, drafts: Sequence[int]) -> Tensor:
        sampling = self._sampling
        if self._counts is None:
            self._counts = TokenCounts(self._prompt, logits_RV.shape[1], logits_RV.device)
        self._counts.follow(self._output)
        counts_RV = self._counts.rows(drafts)
        if sampling.repetition_penalty != 1.0:
            seen_RV = self._counts.in_prompt_V | (counts_RV > 0)
            logits_RV = penalise_repetition(logits_RV, seen_RV, sampling.repetition_penalty)
        return penalise_output(
            logits_RV, counts_RV, sampling.frequency_penalty, sampling.presence_penalty
        )


class TokenCounts:
    """How often each token stands in a request's output, and whether in its prompt."""

    def __init__(self, prompt: Sequence[int], vocab_size: int, device: torch.device) -> None:
        self.in_prompt_V = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self.in_prompt_V[torch.tensor(prompt, dtype=torch.int64, device=device)] = True
        self._output_V = torch.zeros(vocab_size, dtype=torch.float32, device=device)
        self._taken = 0

    def follow(self, output: Sequence[int]) -> None:
        """Count the tokens of ``output`` that aren't counted yet."""
        fresh = list(output[self._taken :])
        self._taken = len(output)
        ids = torch.tensor(fresh, dtype=torch.int64, device=self._output_V.device)
        self._output_V.index_add_(0, ids, torch.ones_like(ids, dtype=torch.float32))

    def rows(self, drafts: Sequence[int]) -> Tensor:
        """``[R, V]``: the output's counts, in row i with the drafts before i."""
        counts_RV = self._output_V.repeat(len(drafts) + 1, 1)
        for i, draft in enumerate(drafts, 1):
            counts_RV[i:, draft] += 1
        return counts_RV


def needs_steering(sampling: Sampling) -> bool:
    """Whether a request asks for anything that isn't the model's own distribution."""
    return bool(
        sampling.grammar is not None
        or sampling.min_tokens
        or sampling.logit_bias
        or penalises(sampling)
    )


def penalises(sampling: Sampling) -> bool:
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def forbid(logits_RV: Tensor, ids: Sequence[int]) -> Tensor:
    """-inf for ``ids``, except in rows that would have nothing left: a grammar's end must be sayable."""
    inside = [i for i in ids if 0 <= i < logits_RV.shape[1]]
    index = torch.tensor(inside, dtype=torch.int64, device=logits_RV.device)
    without_RV = logits_RV.index_fill(1, index, float("-inf"))
    empty_R1 = without_RV.isneginf().all(dim=1, keepdim=True)
    return torch.where(empty_R1, logits_RV, without_RV)


def add_bias(logits_RV: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    bias_V = torch.zeros(logits_RV.shape[1], dtype=logits_RV.dtype, device=logits_RV.device)
    index = torch.tensor([token for token, _ in bias], device=logits_RV.device)
    bias_V[index] = torch.tensor(
        [value for _, value in bias], dtype=logits_RV.dtype, device=logits_RV.device
    )
    return logits_RV + bias_V


def penalise_repetition(logits_RV: Tensor, seen_RV: Tensor, penalty: float) -> Tensor:
    """Positive logits of seen tokens are divided by ``penalty``, others multiplied (Keskar et al. 2019)."""
    penalised_RV = torch.where(logits_RV > 0, logits_RV / penalty, logits_RV * penalty)
    return torch.where(seen_RV, penalised_RV, logits_RV)


def penalise_output(
    logits_RV: Tensor, counts_RV: Tensor, frequency: float, presence: float
) -> Tensor:
    """Minus ``frequency`` for every time a token stands in the output, ``presence`` once (OpenAI's formula)."""
    return logits_RV - frequency * counts_RV - presence * (counts_RV > 0)
