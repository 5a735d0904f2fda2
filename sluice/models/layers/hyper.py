"""Manifold-constrained hyper-connections: N residual streams mixed by doubly stochastic matrices.

Xie et al. 2026 (mHC) on top of Zhu et al. 2024 (hyper-connections), with DeepSeek-V4's constants.
Everything here is per token, so there is no sequence state.

Shape legend: T tokens, N streams, D hidden size. Mixing weights are float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.layers.norm import accumulation_dtype, rms_norm


@dataclass(frozen=True)
class HyperParams:
    """Constants of a model's hyper-connections."""

    num_streams: int
    sinkhorn_iters: int
    hc_eps: float
    norm_eps: float


@dataclass(frozen=True)
class HyperWeights:
    """Mixing weights of one sublayer: ``fn [(2+N)N, N*D]``, ``base [(2+N)N]``, ``scale [3]``.

    For the head collapse: ``fn [N, N*D]``, ``base [N]``, ``scale [1]``.
    """

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class HyperMix:
    """How one sublayer reads and writes the streams of each token.

    ``collapsed_TD`` is the sublayer's input (before its norm); ``post_TN`` and ``comb_TNN`` are
    what ``hyper_expand`` needs, with ``comb[j, k]`` from stream j to stream k.
    """

    collapsed_TD: Tensor
    post_TN: Tensor
    comb_TNN: Tensor


def hyper_mix(streams_TND: Tensor, weights: HyperWeights, params: HyperParams) -> HyperMix:
    """Collapse the streams into a sublayer's input and compute its write-back weights."""
    n = params.num_streams
    pre, post, comb = _project(streams_TND, weights, params).split([n, n, n * n], dim=-1)
    base_pre, base_post, base_comb = weights.base.split([n, n, n * n])
    scale_pre, scale_post, scale_comb = weights.scale.unbind(0)
    pre_TN = torch.sigmoid(torch.addcmul(base_pre, pre, scale_pre)) + params.hc_eps
    post_TN = 2 * torch.sigmoid(torch.addcmul(base_post, post, scale_post))
    logits_TNN = torch.addcmul(base_comb, comb, scale_comb).unflatten(-1, (n, n))
    comb_TNN = sinkhorn(logits_TNN, params)
    return HyperMix(_weighted_sum(pre_TN, streams_TND), post_TN, comb_TNN)


def hyper_expand(out_TD: Tensor, streams_TND: Tensor, mix: HyperMix) -> Tensor:
    """Write a sublayer's output back: ``X'_k = post_k * out + sum_j comb[j, k] * X_j``."""
    dtype = streams_TND.dtype
    written = mix.post_TN.to(dtype).unsqueeze(-1) * out_TD.unsqueeze(-2)
    return torch.baddbmm(written, mix.comb_TNN.to(dtype).transpose(-1, -2), streams_TND)


def hyper_collapse(streams_TND: Tensor, weights: HyperWeights, params: HyperParams) -> Tensor:
    """The final read before the output norm: ``[T, D]``. No Sinkhorn, no write-back."""
    mixed_TN = _project(streams_TND, weights, params)
    pre_TN = torch.sigmoid(mixed_TN * weights.scale + weights.base) + params.hc_eps
    return _weighted_sum(pre_TN, streams_TND)


def sinkhorn(logits_TNN: Tensor, params: HyperParams) -> Tensor:
    """Project onto (nearly) doubly stochastic matrices: softmax over k, then alternate sums to 1.

    The last normalisation is over j (columns), so columns sum to 1 best (Sinkhorn & Knopp 1967).
    """
    eps = params.hc_eps
    comb = torch.softmax(logits_TNN, dim=-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(params.sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return comb


def _project(streams_TND: Tensor, weights: HyperWeights, params: HyperParams) -> Tensor:
    """Normed, flattened streams (stream-major) times ``fn``, at least float32."""
    flat = streams_TND.flatten(-2).to(accumulation_dtype(streams_TND.dtype))
    return F.linear(rms_norm(flat, None, params.norm_eps), weights.fn.to(flat.dtype))


def _weighted_sum(pre_TN: Tensor, streams_TND: Tensor) -> Tensor:
    wide = streams_TND.to(pre_TN.dtype)
    return torch.matmul(pre_TN.unsqueeze(-2), wide).squeeze(-2).to(streams_TND.dtype)
