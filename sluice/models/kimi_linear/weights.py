"""The weights of a Kimi Linear target, read from any ``TensorSource`` into the forms computed with.

Projections that read the same input are stacked; convolved channels are ordered by head (query, key,
value of head 0, then head 1, ...), as the state is; the latent up-projection is split for absorption.

Shape legend: D hidden, H heads, K key width, V value width, c = 2K + V, C = H*c, r latent width of a
gate, L MLA latent, s shared key part, n unshared key part, W convolution width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.models.kimi_linear.config import KimiLinearConfig, LayerKind
from sluice.models.kimi_linear.moe import DenseWeights, MoeWeights
from sluice.models.loader import TensorSource


@dataclass(frozen=True)
class KdaWeights:
    """One recurrent layer.

    ``w_in [C + r + r + H, D]``: convolved channels, decay gate, output gate, write strength.
    ``conv_WC`` float32; ``decay_up [H*K, r]``; ``gate_up [H*V, r]``; ``rate_H = exp(A_log)``;
    ``dt_bias [H*K]``; ``o_norm [V]``; ``w_out [D, H*V]``.
    """

    w_in: Tensor
    conv_WC: Tensor
    decay_up: Tensor
    dt_bias: Tensor
    rate_H: Tensor
    gate_up: Tensor
    o_norm: Tensor
    w_out: Tensor


@dataclass(frozen=True)
class MlaWeights:
    """One attention layer.

    ``w_in [H*(n+s) + L+s, D]``: queries, then the latent row. ``absorb_HnL`` turns a query into latent
    space, ``expand_HLV`` a mixed latent into a head's value.
    """

    w_in: Tensor
    kv_norm: Tensor
    absorb_HnL: Tensor
    expand_HLV: Tensor
    w_out: Tensor


@dataclass(frozen=True)
class LayerWeights:
    attn_norm: Tensor
    attn: KdaWeights | MlaWeights
    ffn_norm: Tensor
    ffn: DenseWeights | MoeWeights


@dataclass(frozen=True)
class TargetWeights:
    """``embed [V, D]``, ``head [V, D]`` (never tied)."""

    embed: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor


def read_target(source: TensorSource, config: KimiLinearConfig) -> TargetWeights:
    """Take every tensor from the source. Errors are the source's (CheckpointError)."""
    vocab, hidden = config.vocab_size, config.hidden_size
    return TargetWeights(
        embed=source.take("embed_tokens.weight", (vocab, hidden)),
        layers=tuple(_layer(source, layer, config) for layer in range(config.num_layers)),
        norm=source.take("norm.weight", (hidden,), wide=True),
        head=source.take("lm_head.weight", (vocab, hidden)),
    )


def _layer(source: TensorSource, layer: int, config: KimiLinearConfig) -> LayerWeights:
    prefix, hidden = f"layers.{layer}", (config.hidden_size,)
    recurrent = config.layer_kinds[layer] is LayerKind.KDA
    read_attention = _kda if recurrent else _mla
    return LayerWeights(
        attn_norm=source.take(f"{prefix}.input_layernorm.weight", hidden, wide=True),
        attn=read_attention(source, f"{prefix}.self_attn", config),
        ffn_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden, wide=True),
        ffn=(
            _moe(source, f"{prefix}.mlp", config)
            if config.moe_layers[layer]
            else _dense(source, f"{prefix}.mlp", config.hidden_size, config.intermediate_size)
        ),
    )


def _kda(source: TensorSource, prefix: str, config: KimiLinearConfig) -> KdaWeights:
    shape, hidden = config.kda, config.hidden_size
    heads, keys, values = shape.num_heads, shape.key_dim, shape.value_dim
    widths = {"q": keys, "k": keys, "v": values}
    projections = [
        source.take(f"{prefix}.{name}_proj.weight", (heads * width, hidden))
        for name, width in widths.items()
    ]
    down = [source.take(f"{prefix}.{name}_a_proj.weight", (values, hidden)) for name in ("f", "g")]
    write = source.take(f"{prefix}.b_proj.weight", (heads, hidden))
    return KdaWeights(
        w_in=torch.cat((_by_head(projections, heads), *down, write)),
        conv_WC=_conv(source, prefix, config),
        decay_up=source.take(f"{prefix}.f_b_proj.weight", (heads * keys, values)),
        dt_bias=source.take(f"{prefix}.dt_bias", (heads * keys,), wide=True),
        rate_H=_decay_rates(source, f"{prefix}.A_log", heads),
        gate_up=source.take(f"{prefix}.g_b_proj.weight", (heads * values, values)),
        o_norm=source.take(f"{prefix}.o_norm.weight", (values,), wide=True),
        w_out=source.take(f"{prefix}.o_proj.weight", (hidden, heads * values)),
    )


def _decay_rates(source: TensorSource, name: str, heads: int) -> Tensor:
    return source.take(name, (1, 1, heads, 1), wide=True).flatten().exp()


def _conv(source: TensorSource, prefix: str, config: KimiLinearConfig) -> Tensor:
    """``[W, C]`` from three depth-wise kernels, or from one stacked kernel (module names)."""
    shape = config.kda
    heads, taps = shape.num_heads, shape.conv_width
    widths = [heads * shape.key_dim, heads * shape.key_dim, heads * shape.value_dim]
    if source.has(f"{prefix}.conv1d.weight"):
        stacked = source.take(f"{prefix}.conv1d.weight", (sum(widths), 1, taps), wide=True)
        kernels = list(stacked.squeeze(1).split(widths))
    else:
        kernels = [
            source.take(f"{prefix}.{name}_conv1d.weight", (width, 1, taps), wide=True).squeeze(1)
            for name, width in zip("qkv", widths, strict=True)
        ]
    return _by_head(kernels, heads).T.contiguous()


def _by_head(parts: list[Tensor], heads: int) -> Tensor:
    """Query, key and value rows ``[H*width, X]`` each, interleaved by head: ``[C, X]``."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def _mla(source: TensorSource, prefix: str, config: KimiLinearConfig) -> MlaWeights:
    shape, hidden = config.mla, config.hidden_size
    heads, latent = shape.num_heads, shape.latent_dim
    nope, values = shape.nope_dim, shape.value_dim
    q = source.take(f"{prefix}.q_proj.weight", (heads * (nope + shape.shared_dim), hidden))
    kv = source.take(f"{prefix}.kv_a_proj_with_mqa.weight", (shape.row_dim, hidden))
    up = source.take(f"{prefix}.kv_b_proj.weight", (heads * (nope + values), latent))
    absorb, expand = up.unflatten(0, (heads, -1)).split([nope, values], dim=1)
    return MlaWeights(
        w_in=torch.cat((q, kv)),
        kv_norm=source.take(f"{prefix}.kv_a_layernorm.weight", (latent,), wide=True),
        absorb_HnL=absorb.contiguous(),
        expand_HLV=expand.transpose(1, 2).contiguous(),
        w_out=source.take(f"{prefix}.o_proj.weight", (hidden, heads * values)),
    )


def _moe(source: TensorSource, prefix: str, config: KimiLinearConfig) -> MoeWeights:
    hidden, experts = config.hidden_size, config.num_experts
    width = config.moe_intermediate_size
    w13, w2 = _experts(source, f"{prefix}.experts", experts, hidden, width)
    return MoeWeights(
        gate=source.take(f"{prefix}.gate.weight", (experts, hidden), wide=True),
        bias=source.take(f"{prefix}.gate.e_score_correction_bias", (experts,), wide=True),
        w13=w13,
        w2=w2,
        shared=_dense(
            source, f"{prefix}.shared_experts", hidden, width * config.num_shared_experts
        ),
    )


def _experts(
    source: TensorSource, prefix: str, experts: int, hidden: int, width: int
) -> tuple[Tensor, Tensor]:
    """``w13 [E, 2I, D]`` and ``w2 [E, D, I]``, stored stacked or one tensor an expert."""
    if source.has(f"{prefix}.w13.weight"):
        return (
            source.take(f"{prefix}.w13.weight", (experts, 2 * width, hidden)),
            source.take(f"{prefix}.w2.weight", (experts, hidden, width)),
        )
    w13, w2 = [], []
    for expert in range(experts):
        one = f"{prefix}.{expert}"
        gate = source.take(f"{one}.w1.weight", (width, hidden))
        w13.append(torch.cat((gate, source.take(f"{one}.w3.weight", (width, hidden)))))
        w2.append(source.take(f"{one}.w2.weight", (hidden, width)))
    return torch.stack(w13), torch.stack(w2)


def _dense(source: TensorSource, prefix: str, hidden: int, width: int) -> DenseWeights:
    gate = source.take(f"{prefix}.gate_proj.weight", (width, hidden))
    up = source.take(f"{prefix}.up_proj.weight", (width, hidden))
    return DenseWeights(
        w13=torch.cat((gate, up)), w2=source.take(f"{prefix}.down_proj.weight", (hidden, width))
    )
