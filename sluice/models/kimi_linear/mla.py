"""Multi-head latent attention without positions, in the absorbed form (DeepSeek-V2, arXiv 2405.04434).

A token leaves one row for all heads: its normed latent and a shared key part, which is never rotated
(NoPE) but still scored. Queries are brought into latent space, and values out of it, so keys and
values are never expanded.

Shape legend: P token rows (at least T, see ``model.py``), T tokens, H heads, n unshared key part,
s shared key part, L latent width, V value width, R rows of a group, N queries a row, E keys.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.kimi_linear.config import MlaShape
from sluice.models.kimi_linear.plan import Keys, LatentPlan
from sluice.models.kimi_linear.weights import MlaWeights
from sluice.models.layers.norm import accumulation_dtype, rms_norm

# Scores are bounded by taking queries in blocks of about this many.
_SCORES_A_BLOCK = 1 << 24


def mla(
    x_PD: Tensor,
    weights: MlaWeights,
    shape: MlaShape,
    plan: LatentPlan,
    buffer: Tensor,
    norm_eps: float,
) -> Tensor:
    """Attend and write this batch's latent rows, ``[P, D]``. ``x_PD`` is the normed layer input."""
    num_tokens, heads = len(plan.written_row_T), shape.num_heads
    q_width = heads * (shape.nope_dim + shape.shared_dim)
    q, latent, shared = F.linear(x_PD, weights.w_in).split(
        [q_width, shape.latent_dim, shape.shared_dim], dim=-1
    )
    row_PJ = torch.cat((rms_norm(latent, weights.kv_norm, norm_eps), shared), dim=-1)
    buffer.index_copy_(0, plan.written_row_T, row_PJ[:num_tokens].to(buffer.dtype))
    nope_PHn, shared_PHs = q.unflatten(-1, (heads, -1)).split(
        [shape.nope_dim, shape.shared_dim], dim=-1
    )
    absorbed_HPL = torch.bmm(nope_PHn.transpose(0, 1), weights.absorb_HnL)
    q_PHJ = torch.cat((absorbed_HPL.transpose(0, 1), shared_PHs), dim=-1)
    mixed_PHL = q_PHJ.new_zeros(len(x_PD), heads, shape.latent_dim)
    for keys in plan.keys:
        group = keys.group
        mixed_RNHL = _attend(q_PHJ[group.token_RN], buffer, keys, shape)
        mixed_PHL[group.tokens] = mixed_RNHL[group.real_RN]
    value_HPV = torch.bmm(mixed_PHL.transpose(0, 1), weights.expand_HLV)
    return F.linear(value_HPV.transpose(0, 1).flatten(1), weights.w_out)


def _attend(q_RNHJ: Tensor, buffer: Tensor, keys: Keys, shape: MlaShape) -> Tensor:
    """Latents mixed by softmax weights, ``[R, N, H, L]``."""
    row_REJ = buffer[keys.row_RE].to(q_RNHJ.dtype)
    rows, queries, heads = q_RNHJ.shape[:3]
    block = max(1, _SCORES_A_BLOCK // (rows * heads * row_REJ.shape[1]))
    parts = [
        _attend_block(
            q_RNHJ[:, first : first + block],
            row_REJ,
            keys.visible_RNE[:, first : first + block],
            shape,
        )
        for first in range(0, queries, block)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _attend_block(q_RNHJ: Tensor, row_REJ: Tensor, visible_RNE: Tensor, shape: MlaShape) -> Tensor:
    wide = accumulation_dtype(q_RNHJ.dtype)
    queries, heads = q_RNHJ.shape[1:3]
    q_RMJ = q_RNHJ.flatten(1, 2)
    scores_RME = torch.bmm(q_RMJ, row_REJ.transpose(1, 2)).to(wide) * shape.scale
    scores_RNHE = scores_RME.unflatten(1, (queries, heads))
    scores_RNHE = scores_RNHE.masked_fill(~visible_RNE.unsqueeze(2), float("-inf"))
    weight_RME = torch.softmax(scores_RNHE, dim=-1).flatten(1, 2).to(row_REJ.dtype)
    mixed_RML = torch.bmm(weight_RME, row_REJ[..., : shape.latent_dim])
    mixed_RNHL: Tensor = mixed_RML.unflatten(1, (queries, heads))
    return mixed_RNHL
