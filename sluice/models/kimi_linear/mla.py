"""Multi-head latent attention without positions, in the absorbed form (DeepSeek-V2, arXiv 2405.04434).

A token leaves one row for all heads: its normed latent and a shared key part, which is never rotated
(NoPE) but still scored. Queries are brought into latent space, and values out of it, so keys and
values are never expanded.

Shape legend: P token rows (at least T, see ``model.py``), T tokens, H heads, n unshared key part,
s shared key part, L latent width, V value width, R rows of a group, N queries a row, E keys.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.kimi_linear.config import MlaShape
from sluice.models.kimi_linear.plan import KEY_BLOCK, Keys, LatentPlan
from sluice.models.kimi_linear.weights import MlaWeights
from sluice.models.layers.norm import accumulation_dtype, rms_norm
from sluice.parallel.context import NO_CONTEXT, ContextParallel, Partial, merge
from sluice.pools.state_rows import StateRows

# Scores are bounded by taking queries in blocks of about this many.
_SCORES_A_BLOCK = 1 << 24
LSE_BASE = math.e  # of the log-sums that this kernel gives
_LOWEST = -1e30  # stands for the best score of no key


def mla(
    x_PD: Tensor,
    weights: MlaWeights,
    shape: MlaShape,
    plan: LatentPlan,
    state: StateRows,
    norm_eps: float,
    num_tokens: int,
    context: ContextParallel = NO_CONTEXT,
) -> Tensor:
    """Attend and write this batch's latent rows, ``[P, D]``. ``x_PD`` is the normed layer input.

    Ranks of a ``context`` each hold some of the keys: they attend with the queries of all their heads, and
    merge what came of it.
    """
    heads = len(weights.absorb_HnL)  # of all context ranks, where queries are replicated
    q_width = heads * (shape.nope_dim + shape.shared_dim)
    q, latent, shared = F.linear(x_PD, weights.w_in).split(
        [q_width, shape.latent_dim, shape.shared_dim], dim=-1
    )
    row_PJ = torch.cat((rms_norm(latent, weights.kv_norm, norm_eps), shared), dim=-1)
    state.write(
        plan.written_row_T, row_PJ[:num_tokens] if plan.own_W is None else row_PJ[plan.own_W]
    )
    nope_PHn, shared_PHs = q.unflatten(-1, (heads, -1)).split(
        [shape.nope_dim, shape.shared_dim], dim=-1
    )
    absorbed_HPL = torch.bmm(nope_PHn.transpose(0, 1), weights.absorb_HnL)
    q_PHJ = torch.cat((absorbed_HPL.transpose(0, 1), shared_PHs), dim=-1)
    if context.size > 1:
        mixed_PHL = _attend_together(q_PHJ, plan, state, shape, context)
    else:
        mixed_PHL = q_PHJ.new_zeros(len(x_PD), heads, shape.latent_dim)
        for keys in plan.keys:
            group = keys.group
            mixed_RNHL, _ = _attend(q_PHJ[group.token_RN], state, keys, shape)
            mixed_PHL[group.token_U] = group.gather(mixed_RNHL)
    value_HPV = torch.bmm(mixed_PHL.transpose(0, 1), weights.expand_HLV)
    return F.linear(value_HPV.transpose(0, 1).flatten(1), weights.w_out)


def _attend_together(
    q_PHJ: Tensor, plan: LatentPlan, state: StateRows, shape: MlaShape, context: ContextParallel
) -> Tensor:
    """Latents mixed over the keys of all context ranks, ``[P, H, L]`` of this rank's own heads."""
    if not context.replicate_q:
        q_PHJ = context.group.all_gather(q_PHJ, axis=1)
    rows, heads = q_PHJ.shape[:2]
    mixed_PHL = q_PHJ.new_zeros(rows, heads, shape.latent_dim)
    lse_PH = q_PHJ.new_full((rows, heads), -math.inf, dtype=torch.float32)
    for keys in plan.keys:
        group = keys.group
        mixed_RNHL, lse_RNH = _attend(q_PHJ[group.token_RN], state, keys, shape)
        mixed_PHL[group.token_U] = group.gather(mixed_RNHL)
        lse_PH[group.token_U] = group.gather(lse_RNH).float()
    merged_PHL = merge(Partial(mixed_PHL, lse_PH, LSE_BASE), context.group)
    own = heads // context.size
    return merged_PHL[:, context.rank * own : (context.rank + 1) * own].to(q_PHJ.dtype)


def _attend(q_RNHJ: Tensor, state: StateRows, keys: Keys, shape: MlaShape) -> tuple[Tensor, Tensor]:
    """Latents mixed by softmax weights, ``[R, N, H, L]``, and the softmax's log-sum, ``[R, N, H]``;
    queries in blocks.
    """
    rows, queries, heads = q_RNHJ.shape[:3]
    block = max(1, _SCORES_A_BLOCK // (rows * heads * KEY_BLOCK))
    parts = [
        _attend_block(
            q_RNHJ[:, first : first + block],
            keys.visible_RNE[:, first : first + block],
            state,
            keys,
            shape,
        )
        for first in range(0, queries, block)
    ]
    if len(parts) == 1:
        return parts[0]
    mixed, lse = zip(*parts, strict=True)
    return torch.cat(mixed, dim=1), torch.cat(lse, dim=1)


def _attend_block(
    q_RNHJ: Tensor, visible_RNE: Tensor, state: StateRows, keys: Keys, shape: MlaShape
) -> tuple[Tensor, Tensor]:
    """One pass over the keys with a running maximum and sum (online softmax, arXiv 1805.02867).

    Every block of keys has the same shape and comes in the same order, and one that a query doesn't
    see changes nothing: its bits don't depend on how many keys later queries of its row need. Without any
    key (a rank that holds none of the visible ones) the result is 0 and the log-sum -inf.
    """
    row_RE, dealt = keys.row_RE, keys.held_RE is not None
    queries, heads = q_RNHJ.shape[1:3]
    q_RMJ = q_RNHJ.flatten(1, 2)
    shape_RM1 = (*q_RMJ.shape[:2], 1)
    wide = accumulation_dtype(q_RMJ.dtype)
    best_RM1 = q_RMJ.new_full(shape_RM1, float("-inf"), dtype=wide)
    total_RM1 = q_RMJ.new_zeros(shape_RM1, dtype=wide)
    mixed_RML: Tensor = total_RM1.expand(-1, -1, shape.latent_dim)
    for first in range(0, row_RE.shape[1], KEY_BLOCK):
        some = slice(first, first + KEY_BLOCK)
        row_REJ = state.read(row_RE[:, some], q_RMJ.dtype)
        # Replaced: a row that isn't there holds anything, NaN included.
        if keys.held_RE is not None:
            row_REJ = row_REJ.masked_fill(~keys.held_RE[:, some].unsqueeze(-1), 0.0)
        unseen_RME = ~visible_RNE[:, :, some].repeat_interleave(heads, dim=1)
        scores_RME = torch.bmm(q_RMJ, row_REJ.transpose(1, 2)).to(wide) * shape.scale
        scores_RME = scores_RME.masked_fill(unseen_RME, float("-inf"))
        # Finite from the first block on: every query sees position 0, unless another rank holds it.
        new_best_RM1 = torch.maximum(best_RM1, scores_RME.amax(-1, keepdim=True))
        base_RM1 = new_best_RM1.clamp(min=_LOWEST) if dealt else new_best_RM1
        weight_RME = (scores_RME - base_RM1).exp()
        shrink_RM1 = (best_RM1 - base_RM1).exp()
        here_RML = torch.bmm(weight_RME.to(q_RMJ.dtype), row_REJ[..., : shape.latent_dim])
        total_RM1 = total_RM1 * shrink_RM1 + weight_RME.sum(-1, keepdim=True)
        mixed_RML = mixed_RML * shrink_RM1 + here_RML
        best_RM1 = new_best_RM1
    lse_RNH = (best_RM1 + total_RM1.log()).squeeze(-1).unflatten(1, (queries, heads))
    if dealt:
        total_RM1 = total_RM1.clamp(min=torch.finfo(wide).tiny)
    normed_RML = (mixed_RML / total_RM1).to(q_RMJ.dtype)
    mixed_RNHL: Tensor = normed_RML.unflatten(1, (queries, heads))
    return mixed_RNHL, lse_RNH
