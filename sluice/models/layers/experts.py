"""Experts' weights as stored, stacked or one tensor each, cut by width: every rank has a part of every expert.

By width and not by expert, because then ranks always have equal work, whatever the router chooses.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sluice.models.loader import TensorSource
from sluice.parallel.cut import part_of
from sluice.parallel.group import Parallel


def take_experts(
    source: TensorSource, prefix: str, experts: int, hidden: int, width: int, parallel: Parallel
) -> tuple[Tensor, Tensor]:
    """``w13 [E, 2I, D]`` (gate above up) and ``w2 [E, D, I]``, I the rank's part of ``width``."""
    if source.has(f"{prefix}.w13.weight"):
        gate_up = part_of(parallel, 1, blocks=(width, width))
        return (
            source.take(f"{prefix}.w13.weight", (experts, 2 * width, hidden), cuts=gate_up),
            source.take(f"{prefix}.w2.weight", (experts, hidden, width), cuts=part_of(parallel, 2)),
        )
    rows, columns = part_of(parallel, 0), part_of(parallel, 1)
    w13, w2 = [], []
    for expert in range(experts):
        one = f"{prefix}.{expert}"
        w1 = source.take(f"{one}.w1.weight", (width, hidden), cuts=rows)
        w3 = source.take(f"{one}.w3.weight", (width, hidden), cuts=rows)
        w13.append(torch.cat((w1, w3)))
        w2.append(source.take(f"{one}.w2.weight", (hidden, width), cuts=columns))
    return torch.stack(w13), torch.stack(w2)
