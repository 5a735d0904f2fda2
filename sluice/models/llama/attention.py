"""Grouped-query attention over paged history (Ainslie et al. 2023), with optional head norms (Qwen3).

Shape legend: T tokens, D hidden, H query heads, K key/value heads, G = H / K, d head width; S segments,
N queries a segment, L positions of a rectangle.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.layers.norm import rms_norm
from sluice.models.llama.config import LlamaConfig
from sluice.models.llama.plan import AttentionPlan, Rectangle
from sluice.models.llama.rope import apply_rope
from sluice.models.llama.weights import LayerWeights
from sluice.pools.state_rows import StateRows


def attention(
    x_TD: Tensor, weights: LayerWeights, config: LlamaConfig, plan: AttentionPlan, rows: StateRows
) -> Tensor:
    """Write this batch's keys and values, then attend, ``[T, D]``. ``x_TD`` is the normed input.

    ``rows`` is the layer's state, ``[K, 2, d]`` a row.
    """
    q_THd, k_TKd, v_TKd = _project(x_TD, weights, config)
    q_THd, k_TKd = apply_rope(q_THd, plan.rotation), apply_rope(k_TKd, plan.rotation)
    kv_TK2d = torch.stack((k_TKd, v_TKd), dim=2)
    rows.write(plan.written_row_T, kv_TK2d)
    parts = [_attend(q_THd[one.tokens], one, rows) for one in plan.rectangles]
    o_THd = parts[0] if len(parts) == 1 else torch.cat(parts)
    return F.linear(o_THd.flatten(1), weights.wo, weights.bo)


def _project(
    x_TD: Tensor, weights: LayerWeights, config: LlamaConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values before rope."""
    heads = F.linear(x_TD, weights.wqkv, weights.bqkv).unflatten(-1, (-1, config.head_dim))
    kv = config.num_kv_heads
    q_THd, k_TKd, v_TKd = heads.split((config.num_heads, kv, kv), dim=1)
    if weights.q_norm is not None and weights.k_norm is not None:
        q_THd = rms_norm(q_THd, weights.q_norm, config.norm_eps)
        k_TKd = rms_norm(k_TKd, weights.k_norm, config.norm_eps)
    return q_THd, k_TKd, v_TKd


def _attend(q_THd: Tensor, rectangle: Rectangle, rows: StateRows) -> Tensor:
    """Softmax attention of one rectangle's tokens, ``[S*N, H, d]``.

    Heads of a group are more queries on the same keys, so that nothing is repeated per head.
    """
    kv_SLK2d = rows.read(rectangle.row_SL, q_THd.dtype)
    k_SKLd, v_SKLd = kv_SLK2d.permute(3, 0, 2, 1, 4).unbind(0)
    num_kv_heads, head_dim = k_SKLd.shape[1], k_SKLd.shape[3]
    q_SNKGd = q_THd.view(
        -1, rectangle.queries, num_kv_heads, q_THd.shape[1] // num_kv_heads, head_dim
    )
    q_SKQd = q_SNKGd.permute(0, 2, 3, 1, 4).flatten(2, 3)
    o_SKQd = F.scaled_dot_product_attention(
        q_SKQd, k_SKLd, v_SKLd, attn_mask=rectangle.visible_S1QL
    )
    o_SKGNd = o_SKQd.unflatten(2, (-1, rectangle.queries))
    o_THd: Tensor = o_SKGNd.permute(0, 3, 1, 2, 4).reshape(q_THd.shape)
    return o_THd
