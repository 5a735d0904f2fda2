"""A Kimi Delta Attention layer over a ragged batch: convolution, gates, recurrence, gated norm.

Shape legend: P token rows (at least T, see ``model.py``), T tokens, D hidden, S segments, H heads,
K key width, V value width, c = 2K + V, C = H*c channels, W convolution taps, R rows of a group,
N steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sluice.models.kimi_linear.config import KdaShape
from sluice.models.kimi_linear.delta import Writes, chunked, scan, unit
from sluice.models.kimi_linear.plan import StatePlan
from sluice.models.kimi_linear.weights import KdaWeights
from sluice.models.layers.norm import rms_norm


@dataclass(frozen=True)
class KdaBuffers:
    """One layer's slots: ``conv [slots, H, W - 1, c]``, ``recurrent [slots, H, K, V]``."""

    conv: Tensor
    recurrent: Tensor


@dataclass(frozen=True)
class KdaTrace:
    """What one layer needs to move verified rows on later: its workspace, and the writes of the
    first group's rows (``[R, N]``), of which the first ``num_verify`` are verified.
    """

    workspace: Tensor
    writes: Writes


def kda(
    x_PD: Tensor,
    weights: KdaWeights,
    shape: KdaShape,
    plan: StatePlan,
    buffers: KdaBuffers,
    norm_eps: float,
) -> tuple[Tensor, KdaTrace | None]:
    """The layer's output ``[P, D]``. Slots of verified segments are read, all others moved on.

    ``x_PD`` is the normed layer input. The trace is there when segments are verified.
    """
    num_tokens, heads = len(plan.source_TW), shape.num_heads
    channels, decay_in, gate_in, strength = F.linear(x_PD, weights.w_in).split(
        [heads * shape.head_channels, shape.value_dim, shape.value_dim, heads], dim=-1
    )
    # Rounded like the stored columns, so that a token is the same row to its own and later chunks.
    rows_TC = channels[:num_tokens].to(buffers.conv.dtype)
    workspace = torch.cat((_columns(plan, buffers.conv), rows_TC))
    mixed_THc = F.silu(_convolve(workspace, plan, weights.conv_WC)).unflatten(1, (heads, -1))
    q, k, v = mixed_THc.split([shape.key_dim, shape.key_dim, shape.value_dim], dim=-1)
    writes = Writes(
        k=unit(k),
        v=v,
        g=_log_decay(decay_in, weights)[:num_tokens],
        beta=torch.sigmoid(strength[:num_tokens].float()),
    )
    q_THK = unit(q) * shape.key_dim**-0.5
    out_THV, trace_writes = _advance(q_THK, writes, plan, buffers)
    _store_columns(workspace, plan, buffers.conv)
    out_PHV = F.pad(out_THV, (0, 0, 0, 0, 0, len(x_PD) - num_tokens))
    gate_PHV = F.linear(gate_in, weights.gate_up).unflatten(-1, (heads, -1))
    normed_PHV = rms_norm(out_PHV, weights.o_norm, norm_eps)
    gated_PHV = (normed_PHV * torch.sigmoid(gate_PHV.float())).to(x_PD.dtype)
    trace = KdaTrace(workspace, trace_writes) if trace_writes is not None else None
    return F.linear(gated_PHV.flatten(1), weights.w_out), trace


def _log_decay(decay_in: Tensor, weights: KdaWeights) -> Tensor:
    """``-exp(A_log) softplus(f(x) + dt_bias)``, ``[P, H, K]`` float32."""
    raw = F.linear(decay_in, weights.decay_up).float() + weights.dt_bias
    heads = len(weights.rate_H)
    amount_PHK: Tensor = F.softplus(raw).unflatten(-1, (heads, -1))
    return -weights.rate_H.unsqueeze(-1) * amount_PHK


def _columns(plan: StatePlan, conv: Tensor) -> Tensor:
    """Every segment's stored columns, oldest first, zeros where nothing came before: ``[S*(W-1), C]``."""
    stored_SHWc = conv[plan.slot_S]
    # Replaced, not multiplied by 0: an unused slot can hold anything, NaN included.
    stored_SHWc = stored_SHWc.masked_fill(plan.fresh_S.view(-1, 1, 1, 1), 0.0)
    return stored_SHWc.transpose(1, 2).flatten(2).flatten(0, 1)


def _convolve(workspace: Tensor, plan: StatePlan, kernel_WC: Tensor) -> Tensor:
    """Depth-wise causal convolution, ``[T, C]`` float32, summed from the oldest tap on."""
    out_TC = workspace[plan.source_TW[:, 0]].float() * kernel_WC[0]
    for tap in range(1, len(kernel_WC)):
        out_TC = out_TC + workspace[plan.source_TW[:, tap]].float() * kernel_WC[tap]
    return out_TC


def _store_columns(workspace: Tensor, plan: StatePlan, conv: Tensor) -> None:
    write_columns(
        workspace, plan.window_SW[plan.num_verify :], plan.slot_S[plan.num_verify :], conv
    )


def write_columns(workspace: Tensor, window_SW: Tensor, slot_S: Tensor, conv: Tensor) -> None:
    """Put workspace rows ``window_SW`` into slots as their columns of state."""
    columns_SWHc = workspace[window_SW].unflatten(-1, (conv.shape[1], -1))
    conv.index_copy_(0, slot_S, columns_SWHc.transpose(1, 2))


def start_states(plan: StatePlan, segment_R: Tensor, recurrent: Tensor) -> Tensor:
    """The state that some segments start from, ``[R, H, K, V]``: a copy."""
    stored = recurrent[plan.slot_S[segment_R]]
    return stored.masked_fill(plan.fresh_S[segment_R].view(-1, 1, 1, 1), 0.0)


def _advance(
    q_THK: Tensor, writes: Writes, plan: StatePlan, buffers: KdaBuffers
) -> tuple[Tensor, Writes | None]:
    """Outputs ``[T, H, V]``; states of segments that aren't verified are written back."""
    out_THV = torch.empty_like(writes.v)
    traced: Writes | None = None
    for group in plan.groups:
        state = start_states(plan, group.segment_R, buffers.recurrent)
        slots, verified = plan.slot_S[group.segment_R], 0
        if group.stepwise:
            of_rows = writes[group.token_RN].only(group.real_RN)
            state, out_RNHV = scan(state, of_rows, q_THK[group.token_RN])
            assert out_RNHV is not None
            out_THV[group.token_U] = group.gather(out_RNHV)
            verified = plan.num_verify
            traced = of_rows if verified else None
        else:
            state_HKV, out_NHV = chunked(state[0], writes[group.token_U], q_THK[group.token_U])
            out_THV[group.token_U] = out_NHV
            state = state_HKV.unsqueeze(0)
        buffers.recurrent.index_copy_(0, slots[verified:], state[verified:])
    return out_THV, traced
