"""Muon: momentum orthogonalised by a Newton-Schulz iteration, for the matrices of a small model.

Method: K. Jordan et al., "Muon" (2024), with the update size matched to AdamW's (factor 0.2 * sqrt(max dim))
as in "Muon is Scalable for LLM Training" (2025).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalise(g: Tensor, steps: int = 5) -> Tensor:
    """Approximate the nearest semi-orthogonal matrices of a batch [n, rows, cols]."""
    a, b, c = _COEFFICIENTS
    x = g / (g.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    out: Tensor = x.mT if tall else x
    return out


class Muon:
    """Updates all matrices of one shape in one batch; `lr` is set by the caller before each step."""

    def __init__(
        self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.01
    ) -> None:
        self.lr, self.momentum, self.decay = 0.0, momentum, decay
        by_shape: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            by_shape[tuple(parameter.shape)].append(parameter)
        self.groups = list(by_shape.values())
        self.buffers = [torch.zeros(len(group), *group[0].shape) for group in self.groups]

    @torch.no_grad()
    def step(self) -> None:
        """Apply one update and drop the gradients."""
        for group, buffer in zip(self.groups, self.buffers, strict=True):
            if group[0].grad is None:
                continue
            grads = torch.stack(
                [p.grad if p.grad is not None else torch.zeros_like(p) for p in group]
            )
            buffer.lerp_(grads, 1 - self.momentum)
            update = orthogonalise(grads.lerp(buffer, self.momentum))
            scale = self.lr * 0.2 * max(update.shape[-2:]) ** 0.5
            for parameter, delta in zip(group, update, strict=True):
                parameter.mul_(1 - self.lr * self.decay).sub_(delta, alpha=scale)
                parameter.grad = None
