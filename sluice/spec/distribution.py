"""From logits to the distribution a request samples from; the same for target and draft, so p and q
are comparable.

Suffixes: R rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sluice.types import Sampling


def is_greedy(sampling: Sampling) -> bool:
    return sampling.temperature == 0.0


def distribution(logits_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Probabilities ``[R, V]`` in float64 after temperature, then min-p, top-k and top-p, in that order.

    A greedy row is one-hot at its argmax. Min-p keeps tokens at least ``min_p`` times as probable as the
    most probable one; top-p keeps the smallest set of most probable tokens
    whose sum reaches ``top_p``. Ties are broken by token id. float64, so that a cumulative sum over
    a large vocabulary keeps its tail.
    """
    assert logits_RV.shape[0] == len(samplings)
    device = logits_RV.device
    temperature = torch.tensor(
        [1.0 if is_greedy(s) else s.temperature for s in samplings],
        dtype=torch.float64,
        device=device,
    )
    scaled_RV = logits_RV.to(torch.float64) / temperature[:, None]
    if any(s.min_p > 0.0 for s in samplings):
        scaled_RV = _cut_min_p(scaled_RV, samplings)
    if any(is_greedy(s) or s.top_k > 0 or s.top_p < 1.0 for s in samplings):
        scaled_RV = _truncate(scaled_RV, samplings)
    return torch.softmax(scaled_RV, dim=-1)


def _cut_min_p(scaled_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """A softmax's ratios are differences of its logits, so no normalisation is needed."""
    floors = [math.log(s.min_p) if s.min_p > 0.0 else -math.inf for s in samplings]
    floor_R = torch.tensor(floors, dtype=scaled_RV.dtype, device=scaled_RV.device)
    cut_RV = scaled_RV - scaled_RV.amax(dim=-1, keepdim=True) < floor_R[:, None]
    return scaled_RV.masked_fill(cut_RV, float("-inf"))


def _truncate(scaled_RV: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """Set everything outside top-k and top-p to -inf."""
    vocab, device = scaled_RV.shape[-1], scaled_RV.device
    keep = [1 if is_greedy(s) else min(s.top_k or vocab, vocab) for s in samplings]
    top_k = torch.tensor(keep, device=device)
    top_p = torch.tensor([s.top_p for s in samplings], dtype=torch.float64, device=device)
    sorted_RV, order_RV = torch.sort(scaled_RV, dim=-1, descending=True, stable=True)
    rank_V = torch.arange(vocab, device=device)
    sorted_RV = sorted_RV.masked_fill(rank_V >= top_k[:, None], float("-inf"))
    probs_RV = torch.softmax(sorted_RV, dim=-1)
    before_RV = probs_RV.cumsum(dim=-1) - probs_RV
    cut_RV = (before_RV >= top_p[:, None]) & (rank_V > 0) & (top_p < 1.0)[:, None]
    sorted_RV = sorted_RV.masked_fill(cut_RV, float("-inf"))
    return torch.full_like(scaled_RV, float("-inf")).scatter(1, order_RV, sorted_RV)


def pick(probs_RV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Inverse-CDF sample of each row; rows need not be normalised, but must have a positive sum."""
    cdf_RV = probs_RV.to(torch.float64).cumsum(dim=-1)
    total_R1 = cdf_RV[:, -1:].contiguous()
    u_R1 = torch.tensor(uniforms, dtype=torch.float64, device=probs_RV.device)[:, None]
    chosen = torch.searchsorted(cdf_RV, u_R1 * total_R1, right=True)
    # u * total may round up to total: the answer is then the last token with any probability.
    last = torch.searchsorted(cdf_RV, total_R1)
    result: list[int] = torch.minimum(chosen, last)[:, 0].tolist()
    return result
