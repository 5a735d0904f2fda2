"""Kimi Linear's experts: sigmoid scores, biased selection within the best groups, plain SwiGLU.

DeepSeek-V3's router (arXiv 2412.19437). Shape legend: T tokens, D hidden, E experts, G groups,
K experts a token, I expert width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.layers.moe import Routing, clamped_swiglu, routed_experts
from sluice.models.layers.norm import accumulation_dtype

_NO_LIMIT = math.inf
_EXPERTS_THAT_RANK_A_GROUP = 2
_NORM_EPS = 1e-20  # published: keeps a token whose chosen scores all underflow finite


@dataclass(frozen=True)
class MoeParams:
    """Constants of a model's router; ``num_groups == 1`` means that there is no group stage."""

    experts_per_token: int
    num_groups: int
    groups_per_token: int
    renormalise: bool
    routed_scaling_factor: float


@dataclass(frozen=True)
class DenseWeights:
    """SwiGLU of every token: ``w13 [2I, D]`` holds gate above up, ``w2 [D, I]``."""

    w13: Tensor
    w2: Tensor


@dataclass(frozen=True)
class MoeWeights:
    """One layer's router, experts and shared expert.

    ``gate [E, D]``, ``bias [E]`` (selection only), ``w13 [E, 2I, D]`` (gate above up), ``w2 [E, D, I]``.
    """

    gate: Tensor
    bias: Tensor
    w13: Tensor
    w2: Tensor
    shared: DenseWeights


def dense(x_TD: Tensor, weights: DenseWeights) -> Tensor:
    return F.linear(clamped_swiglu(F.linear(x_TD, weights.w13), _NO_LIMIT), weights.w2)


def moe(x_TD: Tensor, weights: MoeWeights, params: MoeParams) -> Tensor:
    """Routed experts plus the unscaled shared expert, ``[T, D]``."""
    routing = route(x_TD, weights, params)
    routed_TD = routed_experts(x_TD, routing, weights.w13, weights.w2, _NO_LIMIT)
    return routed_TD + dense(x_TD, weights.shared)


def route(x_TD: Tensor, weights: MoeWeights, params: MoeParams) -> Routing:
    """Select by biased scores; weigh by the unbiased ones."""
    wide = accumulation_dtype(x_TD.dtype)
    scores_TE = torch.sigmoid(F.linear(x_TD.to(wide), weights.gate.to(wide)))
    biased_TE = scores_TE + weights.bias
    if params.num_groups > 1:
        biased_TE = _only_best_groups(biased_TE, params)
    expert_TK = biased_TE.topk(params.experts_per_token, dim=-1).indices
    weight_TK = scores_TE.gather(-1, expert_TK)
    if params.renormalise:
        weight_TK = weight_TK / (weight_TK.sum(-1, keepdim=True) + _NORM_EPS)
    return Routing(expert_TK, weight_TK * params.routed_scaling_factor)


def _only_best_groups(biased_TE: Tensor, params: MoeParams) -> Tensor:
    """Scores outside each token's best groups become -inf. A group ranks by its best two."""
    biased_TGE = biased_TE.unflatten(-1, (params.num_groups, -1))
    rank_TG = biased_TGE.topk(_EXPERTS_THAT_RANK_A_GROUP, dim=-1).values.sum(-1)
    chosen_TG = rank_TG.topk(params.groups_per_token, dim=-1).indices
    open_TG = torch.zeros_like(rank_TG, dtype=torch.bool).scatter(-1, chosen_TG, True)
    left_TGE: Tensor = biased_TGE.masked_fill(~open_TG.unsqueeze(-1), -math.inf)
    return left_TGE.flatten(-2)
