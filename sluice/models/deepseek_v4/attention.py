"""DeepSeek-V4 attention: one latent key-value head, raw window plus compressed entries, sinks.

Keys and values are the same vector, so values carry rope and the output is turned back by the query's
position. Shape legend: T tokens, D hidden, H heads, d head width, r query latent width, K keys a token,
G output groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.deepseek_v4.compressor import CompressorWeights, pool_windows, project_rows
from sluice.models.deepseek_v4.indexer import Selection, select_all, select_top
from sluice.models.deepseek_v4.plan import EntryPlan, TailPlan, WindowPlan
from sluice.models.deepseek_v4.weights import AttentionWeights
from sluice.models.layers.norm import accumulation_dtype, rms_norm
from sluice.models.layers.rope import Rotation, apply_rope

# Gathered keys are bounded by taking queries in blocks of about this many key values.
_KEY_VALUES_A_BLOCK = 1 << 23


@dataclass(frozen=True)
class CompressedPlan:
    """Index tensors and rotations of one compression ratio."""

    tail: TailPlan
    entries: EntryPlan
    closing_rotation: Rotation  # of the first token of each window that closes


@dataclass(frozen=True)
class LayerBuffers:
    """One layer's state rows in the pools: ``[rows, *row_shape]`` each; None where a kind has none."""

    window: Tensor
    entries: Tensor | None = None
    tail: Tensor | None = None
    index_keys: Tensor | None = None
    index_tail: Tensor | None = None


@dataclass(frozen=True)
class AttentionPlan:
    """What the layers of one kind share in a batch."""

    window: WindowPlan
    rotation: Rotation  # of the tokens' positions, in this kind's table
    compressed: CompressedPlan | None
    index_topk: int
    norm_eps: float


def attention(
    x_TD: Tensor, weights: AttentionWeights, plan: AttentionPlan, buffers: LayerBuffers
) -> Tensor:
    """Attend and write this batch's state, ``[T, D]``. ``x_TD`` is the normed sublayer input."""
    latent_Tr = rms_norm(F.linear(x_TD, weights.wq_a), weights.q_norm, plan.norm_eps)
    num_heads = weights.attn_sink.shape[0]
    q_THd = F.linear(latent_Tr, weights.wq_b).unflatten(-1, (num_heads, -1))
    q_THd = apply_rope(rms_norm(q_THd, None, plan.norm_eps), plan.rotation.per_head())
    workspace = _window_rows(x_TD, weights, plan, buffers.window)
    selection = None
    if plan.compressed is not None:
        selection = _compress_and_select(x_TD, latent_Tr, weights, plan, buffers)
    o_THd = _attend(q_THd, weights.attn_sink, workspace, plan.window, buffers.entries, selection)
    o_THd = apply_rope(o_THd, plan.rotation.per_head(), inverse=True)
    return _project_out(o_THd, weights)


def _window_rows(
    x_TD: Tensor, weights: AttentionWeights, plan: AttentionPlan, buffer: Tensor
) -> Tensor:
    """The window's workspace, in the model's dtype; the batch's rows are stored on the way."""
    kv_Td = rms_norm(F.linear(x_TD, weights.wkv), weights.kv_norm, plan.norm_eps)
    kv_Td = apply_rope(kv_Td, plan.rotation).to(buffer.dtype)
    workspace = plan.window.prior.workspace(buffer, kv_Td).to(x_TD.dtype)
    plan.window.store.write(buffer, kv_Td)
    return workspace


def _compress_and_select(
    x_TD: Tensor,
    latent_Tr: Tensor,
    weights: AttentionWeights,
    plan: AttentionPlan,
    buffers: LayerBuffers,
) -> Selection | None:
    """Write the entries that close in this batch, then choose those each token attends to."""
    compressed = plan.compressed
    assert compressed is not None
    assert weights.compressor is not None
    assert buffers.entries is not None
    assert buffers.tail is not None
    entries = compressed.entries
    _compress(x_TD, weights.compressor, compressed, buffers.tail, buffers.entries, plan.norm_eps)
    if weights.indexer is not None:
        assert buffers.index_keys is not None
        assert buffers.index_tail is not None
        indexer, keys = weights.indexer, buffers.index_keys
        _compress(x_TD, indexer.compressor, compressed, buffers.index_tail, keys, plan.norm_eps)
        if entries.num_entries > plan.index_topk:
            return select_top(
                x_TD, latent_Tr, indexer, plan.rotation, keys, entries, plan.index_topk
            )
    return select_all(entries) if entries.num_entries else None


def _compress(
    x_TD: Tensor,
    weights: CompressorWeights,
    plan: CompressedPlan,
    tail: Tensor,
    entries: Tensor,
    norm_eps: float,
) -> None:
    rows_TC = project_rows(x_TD, weights).to(tail.dtype)
    if plan.tail.closes:
        rows_MSC = plan.tail.prior.workspace(tail, rows_TC)[plan.tail.slot_MP]
        entry_Md = pool_windows(
            rows_MSC, weights, plan.tail.first_M, plan.closing_rotation, norm_eps
        )
        entries.index_copy_(0, plan.entries.closing_row_M, entry_Md.to(entries.dtype))
    plan.tail.store.write(tail, rows_TC)


def _attend(
    q_THd: Tensor,
    sink_H: Tensor,
    workspace: Tensor,
    window: WindowPlan,
    entries: Tensor | None,
    selection: Selection | None,
) -> Tensor:
    """One joint softmax over window keys and selected entries, ``[T, H, d]``."""
    num_tokens, num_keys = window.key_TK.shape
    if selection is not None:
        num_keys += selection.row_TK.shape[1]
    block = max(1, _KEY_VALUES_A_BLOCK // (num_keys * q_THd.shape[-1]))
    outputs = []
    for first in range(0, num_tokens, block):
        some = slice(first, first + block)
        keys_TKd, visible_TK = workspace[window.key_TK[some]], window.visible_TK[some]
        if selection is not None:
            assert entries is not None
            seen_TK = selection.visible_TK[some]
            # Replaced, not multiplied by 0: a row nobody may see can hold anything, NaN included.
            chosen_TKd = entries[selection.row_TK[some]].to(keys_TKd.dtype)
            chosen_TKd = chosen_TKd.masked_fill(~seen_TK.unsqueeze(-1), 0.0)
            keys_TKd = torch.cat((keys_TKd, chosen_TKd), dim=1)
            visible_TK = torch.cat((visible_TK, seen_TK), dim=1)
        outputs.append(sink_attention(q_THd[some], keys_TKd, visible_TK, sink_H))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def sink_attention(q_THd: Tensor, keys_TKd: Tensor, visible_TK: Tensor, sink_H: Tensor) -> Tensor:
    """Softmax attention with keys as values; each head's sink takes mass and gives nothing."""
    wide = accumulation_dtype(q_THd.dtype)
    logits_THK = torch.bmm(q_THd, keys_TKd.transpose(1, 2)).to(wide) * q_THd.shape[-1] ** -0.5
    logits_THK = logits_THK.masked_fill(~visible_TK.unsqueeze(1), float("-inf"))
    sink_TH1 = sink_H.to(wide).expand(logits_THK.shape[0], -1).unsqueeze(-1)
    weights_THK = torch.softmax(torch.cat((logits_THK, sink_TH1), dim=-1), dim=-1)[..., :-1]
    return torch.bmm(weights_THK.to(keys_TKd.dtype), keys_TKd)


def _project_out(o_THd: Tensor, weights: AttentionWeights) -> Tensor:
    """Groups of neighbouring heads down to their own low rank, then all groups to D."""
    groups = weights.wo_a.shape[0]
    o_TGJ = o_THd.flatten(1).unflatten(1, (groups, -1))
    low_TGr = torch.einsum("tgj,grj->tgr", o_TGJ, weights.wo_a)
    return F.linear(low_TGr.flatten(1), weights.wo_b)
