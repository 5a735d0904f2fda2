"""The Markov head: how the token before a position corrects the position's block logits.

DSpark (arXiv 2607.05147), semi-autoregressive drafting. All three give a low-rank bias
``W2 f(W1[prev], ...)``; only the RNN remembers more than one token back, and only within a block.

Shape legend: B blocks, R rank, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.dspark.config import MarkovKind


@dataclass(frozen=True)
class MarkovWeights:
    """``w1 [V, R]`` embeds the previous token, ``w2 [V, R]`` turns a rank vector into logits.

    ``proj`` and ``bias``: gated ``[R, D + R]`` over ``[hidden | embedded]``; RNN ``[3R, 2R + D]`` over
    ``[state | embedded | hidden]``, rows gate, candidate, output; vanilla has none.
    """

    kind: MarkovKind
    w1: Tensor
    w2: Tensor
    proj: Tensor | None
    bias: Tensor | None


class MarkovChain:
    """The head along one block of B requests: call ``step`` once a position, in order."""

    def __init__(self, weights: MarkovWeights, batch: int) -> None:
        self._weights = weights
        self._state_BR = weights.w1.new_zeros(batch, weights.w1.shape[1])

    def step(self, previous_B: Tensor, hidden_BD: Tensor) -> Tensor:
        """Logits to add at this position, float32 ``[B, V]``. ``previous_B``: the token before it."""
        embedded_BR = self._weights.w1[previous_B]
        match self._weights.kind:
            case MarkovKind.VANILLA:
                latent_BR = embedded_BR
            case MarkovKind.GATED:
                gate_BR = torch.sigmoid(self._project(hidden_BD, embedded_BR))
                latent_BR = gate_BR * embedded_BR
            case MarkovKind.RNN:
                latent_BR = self._recur(embedded_BR, hidden_BD)
        return F.linear(latent_BR, self._weights.w2).float()

    def keep(self, rows: Tensor) -> None:
        """Go on with these rows of the batch only."""
        self._state_BR = self._state_BR[rows]

    def _recur(self, embedded_BR: Tensor, hidden_BD: Tensor) -> Tensor:
        joint = self._project(self._state_BR, embedded_BR, hidden_BD)
        gate_BR, candidate_BR, output_BR = joint.chunk(3, dim=-1)
        gate_BR = torch.sigmoid(gate_BR)
        self._state_BR = gate_BR * self._state_BR + (1 - gate_BR) * torch.tanh(candidate_BR)
        return torch.tanh(output_BR)

    def _project(self, *parts: Tensor) -> Tensor:
        assert self._weights.proj is not None
        return F.linear(torch.cat(parts, dim=-1), self._weights.proj, self._weights.bias)
