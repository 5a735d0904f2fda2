"""Mixture of experts: sqrt-softplus scores, biased or hashed selection, clamped SwiGLU experts.

DeepSeek-V4's MoE. Shape legend: T tokens, D hidden, E experts, K experts a token, I expert width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.layers.norm import accumulation_dtype

# Up to this many multiplications, running every expert on every token in two matmuls is quicker than
# sorting tokens by expert and launching kernels for each.
_DENSE_LIMIT_PRODUCTS = 1 << 23


@dataclass(frozen=True)
class MoeWeights:
    """One layer's router, experts and shared expert.

    ``gate [E, D]``; ``bias [E]`` (selection only) for score routing, or ``tid2eid [V, K]`` for hash
    routing, never both; ``w13 [E, 2I, D]`` holds w1 (gate) above w3 (up); ``w2 [E, D, I]``; shared
    expert ``shared_w13 [2I, D]``, ``shared_w2 [D, I]``.
    """

    gate: Tensor
    bias: Tensor | None
    tid2eid: Tensor | None
    w13: Tensor
    w2: Tensor
    shared_w13: Tensor
    shared_w2: Tensor


@dataclass(frozen=True)
class MoeParams:
    """Constants of a model's MoE. ``swiglu_limit`` clamps gate from above and up on both sides."""

    experts_per_token: int
    routed_scaling_factor: float
    swiglu_limit: float


@dataclass(frozen=True)
class Routing:
    """Which experts each token goes to, and with what weight: ``[T, K]`` int64 and float."""

    expert_TK: Tensor
    weight_TK: Tensor


def moe(x_TD: Tensor, token_ids_T: Tensor, weights: MoeWeights, params: MoeParams) -> Tensor:
    """Routed experts plus the shared expert, ``[T, D]``."""
    routing = route(x_TD, token_ids_T, weights, params)
    routed_TD = routed_experts(x_TD, routing, weights.w13, weights.w2, params.swiglu_limit)
    hidden = clamped_swiglu(F.linear(x_TD, weights.shared_w13), params.swiglu_limit)
    return routed_TD + F.linear(hidden, weights.shared_w2)


def route(x_TD: Tensor, token_ids_T: Tensor, weights: MoeWeights, params: MoeParams) -> Routing:
    """Select experts and weigh them by their unbiased scores; weights sum to the scaling factor."""
    scores_TE = router_scores(x_TD, weights.gate)
    if weights.tid2eid is not None:
        expert_TK = weights.tid2eid[token_ids_T].long()
    else:
        assert weights.bias is not None
        biased_TE = scores_TE.detach() + weights.bias
        expert_TK = biased_TE.topk(params.experts_per_token, dim=-1).indices
    chosen_TK = scores_TE.gather(-1, expert_TK)
    weight_TK = chosen_TK / chosen_TK.sum(-1, keepdim=True) * params.routed_scaling_factor
    return Routing(expert_TK, weight_TK)


def router_scores(x_TD: Tensor, gate_ED: Tensor) -> Tensor:
    """``sqrt(softplus(x gate^T))``, ``[T, E]``, at least float32."""
    wide = accumulation_dtype(x_TD.dtype)
    scores_TE: Tensor = F.softplus(F.linear(x_TD.to(wide), gate_ED.to(wide)))
    return scores_TE.sqrt()


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """``silu(min(gate, limit)) * clamp(up, -limit, limit)`` of ``[..., 2I]`` (gate first)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def routed_experts(
    x_TD: Tensor, routing: Routing, w13_EJD: Tensor, w2_EDI: Tensor, limit: float
) -> Tensor:
    """Weighted sum of each token's experts, ``[T, D]`` in ``x``'s dtype (J = 2I)."""
    if len(x_TD) * (w13_EJD.numel() + w2_EDI.numel()) <= _DENSE_LIMIT_PRODUCTS:
        return _dense(x_TD, routing, w13_EJD, w2_EDI, limit)
    out_PD = _sorted_by_expert(x_TD, routing.expert_TK, w13_EJD, w2_EDI, limit)
    out_TKD = out_PD.unflatten(0, routing.expert_TK.shape)
    weighted_TKD: Tensor = out_TKD * routing.weight_TK.unsqueeze(-1)
    return weighted_TKD.sum(1).to(x_TD.dtype)


def _dense(x_TD: Tensor, routing: Routing, w13_EJD: Tensor, w2_EDI: Tensor, limit: float) -> Tensor:
    """All experts for all tokens, those not chosen weighed 0 (the clamp keeps them finite)."""
    num_experts = w13_EJD.shape[0]
    gate_up_TEJ = F.linear(x_TD, w13_EJD.flatten(0, 1)).unflatten(-1, (num_experts, -1))
    weight_TE = routing.weight_TK.new_zeros(len(x_TD), num_experts)
    weight_TE = weight_TE.scatter_add(1, routing.expert_TK, routing.weight_TK)
    hidden_TEI = (clamped_swiglu(gate_up_TEJ, limit) * weight_TE.unsqueeze(-1)).to(x_TD.dtype)
    return torch.bmm(hidden_TEI.transpose(0, 1), w2_EDI.transpose(1, 2)).sum(0)


def _sorted_by_expert(
    x_TD: Tensor, expert_TK: Tensor, w13_EJD: Tensor, w2_EDI: Tensor, limit: float
) -> Tensor:
    """Many pairs: sort them by expert, one matmul an active expert, undo the sort, ``[T*K, D]``."""
    k = expert_TK.shape[1]
    expert_P = expert_TK.flatten()
    order_P = expert_P.argsort(stable=True)
    counts = torch.bincount(expert_P, minlength=w13_EJD.shape[0]).tolist()
    outputs = []
    for expert, part_PD in enumerate(x_TD[order_P // k].split(counts)):
        if counts[expert]:
            hidden = clamped_swiglu(F.linear(part_PD, w13_EJD[expert]), limit)
            outputs.append(F.linear(hidden, w2_EDI[expert]))
    return torch.cat(outputs)[order_P.argsort()]
