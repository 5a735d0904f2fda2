"""Decode context parallelism: ranks that hold a history in turns, and how their partial attentions are merged."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.parallel.group import SINGLE, Parallel


@dataclass(frozen=True)
class ContextParallel:
    """The ranks that deal a history among them, neighbours within the tensor-parallel ones.

    ``replicate_q``: every rank computes the queries of all their heads itself (its copy of the projections
    is as many times larger), instead of gathering them from the others in every layer.
    """

    group: Parallel = SINGLE
    replicate_q: bool = False

    @property
    def size(self) -> int:
        return self.group.size

    @property
    def rank(self) -> int:
        return self.group.rank


NO_CONTEXT = ContextParallel()


def own_lengths(lengths: Tensor, ranks: int, rank: int) -> Tensor:
    """How many of the first ``lengths`` tokens of a history are rank ``rank``'s, of ``ranks`` that hold it in
    turns from token 0 on: ``L // N + (r < L % N)``. Over all ranks they add up to ``lengths``.
    """
    return lengths // ranks + (rank < lengths % ranks)


@dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: ``out [..., H, L]`` normalised over those, and the logarithm of the
    sum of exponentials that it was normalised by, ``lse [..., H]``, to base ``lse_base`` (the kernel says
    which: e, or 2 for kernels that work in powers of two). A row without keys has ``lse`` -inf, whatever
    its ``out``.
    """

    out: Tensor
    lse: Tensor
    lse_base: float


def merge(partial: Partial, group: Parallel) -> Tensor:
    """Attention over all ranks' keys, float32: the outputs weighted by each rank's part of the sum.

    ``sum_r out_r base^(lse_r - lse)`` with ``lse = log_base sum_r base^lse_r`` (flash-decoding's reduction).
    Ranks without keys, and rows without any, contribute nothing.
    """
    own = partial.lse.float() * math.log(partial.lse_base)
    total = torch.logsumexp(group.all_gather(own.unsqueeze(0), axis=0), dim=0)
    weight = torch.where(own > -math.inf, (own - total).exp(), 0.0).unsqueeze(-1)
    # Replaced, not multiplied by 0: the output of a row without keys can be anything, NaN included.
    return group.all_reduce(torch.where(weight > 0, partial.out.float() * weight, 0.0))
