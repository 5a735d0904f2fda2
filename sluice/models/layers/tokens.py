"""A token table whose rows ranks share: embedding by lookup, vocabulary logits by product.

Shape legend: V vocabulary, D hidden, T tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.loader import TensorSource
from sluice.parallel.cut import part_of, share
from sluice.parallel.group import SINGLE, Parallel


@dataclass(frozen=True)
class TokenTable:
    """``rows [V / ranks, D]``: this rank's tokens, in order."""

    rows: Tensor
    parallel: Parallel = SINGLE

    @property
    def shape(self) -> tuple[int, int]:
        """Of the whole table: ``(V, D)``."""
        return len(self.rows) * self.parallel.size, self.rows.shape[1]

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def dtype(self) -> torch.dtype:
        return self.rows.dtype

    def embed(self, ids: Tensor) -> Tensor:
        """``[...]`` token ids -> ``[..., D]``."""
        if self.parallel.size == 1:
            return self.rows[ids]
        local = ids - self.parallel.rank * len(self.rows)
        own = (local >= 0) & (local < len(self.rows))
        found = self.rows[local.clamp(0, len(self.rows) - 1)]
        return self.parallel.all_reduce(found.masked_fill(~own.unsqueeze(-1), 0.0))

    def logits(self, x: Tensor) -> Tensor:
        """``[..., D]`` -> ``[..., V]`` in ``x``'s dtype, the same bits on every rank."""
        return self.parallel.all_gather(F.linear(x, self.rows.to(x.dtype)))


def take_table(
    source: TensorSource,
    name: str,
    vocab: int,
    hidden: int,
    parallel: Parallel,
    *,
    wide: bool = False,
) -> TokenTable:
    """Raises ``ConfigError`` for a vocabulary that the ranks can't share equally."""
    share("vocab_size", vocab, parallel.size)
    rows = source.take(name, (vocab, hidden), wide=wide, cuts=part_of(parallel, 0))
    return TokenTable(rows, parallel)
