"""The lightning indexer: which compressed entries of a CSA layer each token attends to.

Shape legend: T tokens, S segments, E entries of the longest segment, K selected, H index heads,
d index width, r query latent width, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.deepseek_v4.plan import EntryPlan
from sluice.models.deepseek_v4.weights import IndexerWeights
from sluice.models.layers.norm import accumulation_dtype
from sluice.models.layers.rope import Rotation, apply_rope


@dataclass(frozen=True)
class Selection:
    """Physical rows of the entries each token attends to, and which of them it may see: ``[T, K]``."""

    row_TK: Tensor
    visible_TK: Tensor


def select_all(plan: EntryPlan) -> Selection:
    """Every entry of the token's segment (HCA layers, and CSA layers while all entries fit)."""
    ordinal_E = torch.arange(plan.num_entries, device=plan.row_SE.device)
    return Selection(plan.row_SE[plan.segment_T], ordinal_E < plan.visible_T.unsqueeze(1))


def select_top(
    x_TD: Tensor,
    latent_Tr: Tensor,
    weights: IndexerWeights,
    rotation: Rotation,
    keys: Tensor,
    plan: EntryPlan,
    topk: int,
) -> Selection:
    """The ``topk`` best-scored visible entries of each token; ties go to the older entry.

    ``keys`` is the layer's key buffer ``[rows, d]`` with this batch's entries already in it;
    ``latent_Tr`` the normed query latent; ``rotation`` that of the tokens' positions.
    """
    scores_TE = index_scores(x_TD, latent_Tr, weights, rotation, keys, plan)
    ordinal_TK = top_ordinals(scores_TE, topk)
    row_TK = plan.row_SE[plan.segment_T.unsqueeze(1), ordinal_TK]
    return Selection(row_TK, ordinal_TK < plan.visible_T.unsqueeze(1))


def index_scores(
    x_TD: Tensor,
    latent_Tr: Tensor,
    weights: IndexerWeights,
    rotation: Rotation,
    keys: Tensor,
    plan: EntryPlan,
) -> Tensor:
    """``sum_h a_h relu(q_h . k)`` per entry, ``[T, E]`` in at least float32; -inf where not visible."""
    wide = accumulation_dtype(x_TD.dtype)
    width = keys.shape[-1]
    q_THd = F.linear(latent_Tr, weights.wq_b).unflatten(-1, (-1, width))
    q_THd = apply_rope(q_THd, rotation.per_head()).to(wide)
    num_heads = q_THd.shape[1]
    scale = width**-0.5 * num_heads**-0.5
    weight_TH = F.linear(x_TD, weights.weights_proj).to(wide) * scale
    scores = []
    for rectangle in plan.rectangles:
        keys_GEd = keys[plan.row_SE[rectangle.segments]].to(wide)
        shape = (-1, rectangle.length, num_heads)
        q_GNHd = q_THd[rectangle.tokens].unflatten(0, shape[:2])
        dots = torch.bmm(q_GNHd.flatten(1, 2), keys_GEd.transpose(1, 2)).relu()
        dots_BHE = dots.unflatten(1, shape[1:]).flatten(0, 1)
        scores.append(torch.bmm(weight_TH[rectangle.tokens].unsqueeze(1), dots_BHE).squeeze(1))
    ordinal_E = torch.arange(plan.num_entries, device=keys.device)
    hidden_TE = ordinal_E >= plan.visible_T.unsqueeze(1)
    return torch.cat(scores).masked_fill(hidden_TE, float("-inf"))


def top_ordinals(scores_TE: Tensor, topk: int) -> Tensor:
    """Ordinals of the ``topk`` highest scores, ascending, ``[T, topk]``; needs E >= topk.

    Ties at the border go to lower ordinals. ``torch.topk`` alone leaves that open, and whole scores of
    exactly 0 (every head's ReLU off) do tie, so two schedules of one prompt would select differently.
    """
    border_T1 = scores_TE.topk(topk, dim=-1).values[:, -1:]
    above_TE = scores_TE > border_T1
    tied_TE = scores_TE == border_T1
    room_T1 = topk - above_TE.sum(-1, keepdim=True)
    chosen_TE = above_TE | (tied_TE & (tied_TE.cumsum(-1) <= room_T1))
    ordinal_TK: Tensor = chosen_TE.nonzero()[:, 1].unflatten(0, (-1, topk))
    return ordinal_TK
