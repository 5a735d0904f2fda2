"""A block's attention: its rows read the context's keys from the pool, and each other's.

The block's own keys and values never enter the pool, so what is drafted can't become context.

Shape legend: B blocks, N rows a block, L context positions, D hidden, H query heads, K key/value heads,
G = H / K, d head width, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.layout.component import Component
from sluice.models.layers.norm import rms_norm
from sluice.models.llama.config import LlamaConfig
from sluice.models.llama.rope import Rotation, apply_rope, rotation_at
from sluice.models.llama.weights import LayerWeights
from sluice.pools.base import RequestTables, StateMemory
from sluice.pools.rows import physical_rows
from sluice.pools.state_rows import StateRows


@dataclass(frozen=True)
class BlockPlan:
    """What all layers share: where context lies, who sees what, and the rows' rotation."""

    row_BL: Tensor  # physical rows; see ``_context_rows``
    visible_B1QM: Tensor  # Q = G * N (heads of a group outermost), M = L + N keys
    rotation: Rotation  # of B * N rows, end to end

    @classmethod
    def of(
        cls,
        tables: Sequence[RequestTables],
        rows: int,
        *,
        causal: bool,
        memory: StateMemory,
        component: Component,
        freq_F: Tensor,
        group_size: int,
    ) -> BlockPlan:
        """``rows`` a block at positions ``kv_len ..``; its context is
        ``[draft_valid_from, kv_len)``."""
        device, batch = freq_F.device, len(tables)
        stop_B1 = torch.tensor([[one.kv_len] for one in tables], device=device)
        start_B1 = torch.tensor([[one.draft_valid_from] for one in tables], device=device)
        key_L = torch.arange(max(one.kv_len for one in tables), device=device)
        context_BL = (key_L >= start_B1) & (key_L < stop_B1)
        block_NN = torch.ones(rows, rows, dtype=torch.bool, device=device)
        block_NN = block_NN.tril() if causal else block_NN
        visible_BNM = torch.cat(
            (
                context_BL.unsqueeze(1).expand(-1, rows, -1),
                block_NN.expand(batch, -1, -1),
            ),
            dim=-1,
        )
        position_BN = stop_B1 + torch.arange(rows, device=device)
        return cls(
            row_BL=_context_rows(context_BL, tables, memory, component),
            visible_B1QM=visible_BNM.repeat(1, group_size, 1).unsqueeze(1),
            rotation=rotation_at(freq_F, position_BN.flatten()),
        )


def _context_rows(
    context_BL: Tensor, tables: Sequence[RequestTables], memory: StateMemory, component: Component
) -> Tensor:
    """Physical rows of the context. Positions outside it read padding's row 0, which is zero: rows
    that never arrived may hold NaN, and a mask alone doesn't stop 0 * NaN.
    """
    batch, length = context_BL.shape
    owner_BL = torch.arange(batch, device=context_BL.device).unsqueeze(1).expand_as(context_BL)
    if not length:  # an empty context has no pages to look at
        return owner_BL
    key_L = torch.arange(length, device=context_BL.device)
    ordinal_BL = torch.where(context_BL, key_L, 0)
    row_BL = physical_rows(component, memory.batch_tables(tables), owner_BL, ordinal_BL)
    return torch.where(context_BL, row_BL, 0)


def context_kv(
    x_TD: Tensor, weights: LayerWeights, config: LlamaConfig, rotation: Rotation
) -> Tensor:
    """Keys and values of normed input rows: ``[T, K, 2, d]``, keys head-normed and turned."""
    key_rows = config.num_heads * config.head_dim
    bias = None if weights.bqkv is None else weights.bqkv[key_rows:]
    heads = F.linear(x_TD, weights.wqkv[key_rows:], bias).unflatten(-1, (-1, config.head_dim))
    k_TKd, v_TKd = heads.split(config.num_kv_heads, dim=1)
    assert weights.k_norm is not None, "the draft's layers are Qwen3's"
    k_TKd = apply_rope(rms_norm(k_TKd, weights.k_norm, config.norm_eps), rotation)
    return torch.stack((k_TKd, v_TKd), dim=2)


def block_attention(
    x_BND: Tensor, weights: LayerWeights, config: LlamaConfig, plan: BlockPlan, context: StateRows
) -> Tensor:
    """``[B, N, D]`` from the normed input rows. ``context`` is the layer's state, ``[K, 2, d]`` a row."""
    batch, rows = x_BND.shape[:2]
    x_TD = x_BND.flatten(0, 1)
    q_BKQd = _queries(x_TD, weights, config, plan.rotation, batch)
    own_BNK2d = context_kv(x_TD, weights, config, plan.rotation).unflatten(0, (batch, rows))
    past_BLK2d = context.read(plan.row_BL, x_BND.dtype)
    kv_BMK2d = torch.cat((past_BLK2d, own_BNK2d), dim=1)
    k_BKMd, v_BKMd = kv_BMK2d.permute(3, 0, 2, 1, 4).unbind(0)
    o_BKQd = F.scaled_dot_product_attention(q_BKQd, k_BKMd, v_BKMd, attn_mask=plan.visible_B1QM)
    o_BKGNd = o_BKQd.unflatten(2, (config.group_size, rows))
    return F.linear(o_BKGNd.permute(0, 3, 1, 2, 4).flatten(2), weights.wo, weights.bo)


def _queries(
    x_TD: Tensor, weights: LayerWeights, config: LlamaConfig, rotation: Rotation, batch: int
) -> Tensor:
    """``[B, K, G * N, d]``: heads of a group are more queries on the same keys."""
    count = config.num_heads * config.head_dim
    bias = None if weights.bqkv is None else weights.bqkv[:count]
    q_THd = F.linear(x_TD, weights.wqkv[:count], bias).unflatten(-1, (-1, config.head_dim))
    assert weights.q_norm is not None, "the draft's layers are Qwen3's"
    q_THd = apply_rope(rms_norm(q_THd, weights.q_norm, config.norm_eps), rotation)
    q_BNKGd = q_THd.view(batch, -1, config.num_kv_heads, config.group_size, config.head_dim)
    return q_BNKGd.permute(0, 2, 3, 1, 4).flatten(2, 3)
