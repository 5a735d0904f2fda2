"""The weights of a Kimi Linear target, read from any ``TensorSource`` into the forms computed with.

Projections that read the same input are stacked; convolved channels are ordered by head (query, key,
value of head 0, then head 1, ...), as the state is; the latent up-projection is split for absorption.

Shape legend: D hidden, H heads, K key width, V value width, c = 2K + V, C = H*c, r latent width of a
gate, L MLA latent, s shared key part, n unshared key part, W convolution width. Of ranks that share the
model, H is a rank's own heads; gates' inner widths, latents and routers each has whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.models.kimi_linear.config import KimiLinearConfig, LayerKind
from sluice.models.kimi_linear.moe import DenseWeights, MoeWeights
from sluice.models.layers.experts import take_experts
from sluice.models.layers.tokens import TokenTable, take_table
from sluice.models.loader import TensorSource
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.cut import Cut, cut, part_of
from sluice.parallel.group import SINGLE, Parallel


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

    embed: TokenTable
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: TokenTable


def read_target(
    source: TensorSource,
    config: KimiLinearConfig,
    parallel: Parallel = SINGLE,
    context: ContextParallel = NO_CONTEXT,
) -> TargetWeights:
    """Take this rank's part of every tensor. ``config`` is the whole model's.

    Errors are the source's (CheckpointError), and ConfigError where ranks can't share equally.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    return TargetWeights(
        embed=take_table(source, "embed_tokens.weight", vocab, hidden, parallel),
        layers=tuple(
            _layer(source, layer, config, parallel, context) for layer in range(config.num_layers)
        ),
        norm=source.take("norm.weight", (hidden,), wide=True),
        head=take_table(source, "lm_head.weight", vocab, hidden, parallel),
    )


def _layer(
    source: TensorSource,
    layer: int,
    config: KimiLinearConfig,
    parallel: Parallel,
    context: ContextParallel,
) -> LayerWeights:
    prefix, hidden = f"layers.{layer}", (config.hidden_size,)
    recurrent = config.layer_kinds[layer] is LayerKind.KDA
    return LayerWeights(
        attn_norm=source.take(f"{prefix}.input_layernorm.weight", hidden, wide=True),
        attn=(
            _kda(source, f"{prefix}.self_attn", config, parallel)
            if recurrent
            else _mla(source, f"{prefix}.self_attn", config, parallel, context)
        ),
        ffn_norm=source.take(f"{prefix}.post_attention_layernorm.weight", hidden, wide=True),
        ffn=(
            _moe(source, f"{prefix}.mlp", config, parallel)
            if config.moe_layers[layer]
            else _dense(
                source, f"{prefix}.mlp", config.hidden_size, config.intermediate_size, parallel
            )
        ),
    )


def _kda(
    source: TensorSource, prefix: str, config: KimiLinearConfig, parallel: Parallel
) -> KdaWeights:
    """Queries, keys and values are cut one by one: a part of the three end to end would mix them."""
    shape, hidden = config.kda, config.hidden_size
    heads, keys, values = shape.num_heads, shape.key_dim, shape.value_dim
    widths = {"q": keys, "k": keys, "v": values}
    rows, own = part_of(parallel, 0), config.kda.of_rank(parallel.size).num_heads
    projections = [
        source.take(f"{prefix}.{name}_proj.weight", (heads * width, hidden), cuts=rows)
        for name, width in widths.items()
    ]
    down = [source.take(f"{prefix}.{name}_a_proj.weight", (values, hidden)) for name in ("f", "g")]
    write = source.take(f"{prefix}.b_proj.weight", (heads, hidden), cuts=rows)
    return KdaWeights(
        w_in=torch.cat((_by_head(projections, own), *down, write)),
        conv_WC=_conv(source, prefix, config, parallel),
        decay_up=source.take(f"{prefix}.f_b_proj.weight", (heads * keys, values), cuts=rows),
        dt_bias=source.take(f"{prefix}.dt_bias", (heads * keys,), wide=True, cuts=rows),
        rate_H=_decay_rates(source, f"{prefix}.A_log", heads, parallel),
        gate_up=source.take(f"{prefix}.g_b_proj.weight", (heads * values, values), cuts=rows),
        o_norm=source.take(f"{prefix}.o_norm.weight", (values,), wide=True),
        w_out=source.take(
            f"{prefix}.o_proj.weight", (hidden, heads * values), cuts=part_of(parallel, 1)
        ),
    )


def _decay_rates(source: TensorSource, name: str, heads: int, parallel: Parallel) -> Tensor:
    rates = source.take(name, (1, 1, heads, 1), wide=True, cuts=part_of(parallel, 2))
    return rates.flatten().exp()


def _conv(
    source: TensorSource, prefix: str, config: KimiLinearConfig, parallel: Parallel
) -> Tensor:
    """``[W, C]`` from three depth-wise kernels, or from one stacked kernel (module names)."""
    shape = config.kda
    heads, taps = shape.num_heads, shape.conv_width
    widths = [heads * shape.key_dim, heads * shape.key_dim, heads * shape.value_dim]
    rows = part_of(parallel, 0)
    if source.has(f"{prefix}.conv1d.weight"):
        stacked = source.take(f"{prefix}.conv1d.weight", (sum(widths), 1, taps), wide=True)
        kernels = [cut(part, rows) for part in stacked.squeeze(1).split(widths)]
    else:
        kernels = [
            source.take(
                f"{prefix}.{name}_conv1d.weight", (width, 1, taps), wide=True, cuts=rows
            ).squeeze(1)
            for name, width in zip("qkv", widths, strict=True)
        ]
    return _by_head(kernels, shape.of_rank(parallel.size).num_heads).T.contiguous()


def _by_head(parts: list[Tensor], heads: int) -> Tensor:
    """Query, key and value rows ``[H*width, X]`` each, interleaved by head: ``[C, X]``."""
    return torch.cat([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 1)


def _mla(
    source: TensorSource,
    prefix: str,
    config: KimiLinearConfig,
    parallel: Parallel,
    context: ContextParallel,
) -> MlaWeights:
    """With replicated queries, ``w_in``'s and ``absorb`` are those of all heads of the context's ranks."""
    rows = part_of(parallel, 0)
    queries = rows
    if context.size > 1 and context.replicate_q:
        together = Cut(0, parallel.rank // context.size, parallel.size // context.size)
        queries = (together,)
    shape, hidden = config.mla, config.hidden_size
    heads, latent = shape.num_heads, shape.latent_dim
    nope, values = shape.nope_dim, shape.value_dim
    q = source.take(
        f"{prefix}.q_proj.weight", (heads * (nope + shape.shared_dim), hidden), cuts=queries
    )
    kv = source.take(f"{prefix}.kv_a_proj_with_mqa.weight", (shape.row_dim, hidden))
    up = source.take(f"{prefix}.kv_b_proj.weight", (heads * (nope + values), latent), cuts=rows)
    absorb, expand = up.unflatten(0, (-1, nope + values)).split([nope, values], dim=1)
    if queries != rows:
        every = source.take(
            f"{prefix}.kv_b_proj.weight", (heads * (nope + values), latent), cuts=queries
        )
        absorb = every.unflatten(0, (-1, nope + values))[:, :nope]
    return MlaWeights(
        w_in=torch.cat((q, kv)),
        kv_norm=source.take(f"{prefix}.kv_a_layernorm.weight", (latent,), wide=True),
        absorb_HnL=absorb.contiguous(),
        expand_HLV=expand.transpose(1, 2).contiguous(),
        w_out=source.take(
            f"{prefix}.o_proj.weight", (hidden, heads * values), cuts=part_of(parallel, 1)
        ),
    )


def _moe(
    source: TensorSource, prefix: str, config: KimiLinearConfig, parallel: Parallel
) -> MoeWeights:
    hidden, experts = config.hidden_size, config.num_experts
    width = config.moe_intermediate_size
    w13, w2 = take_experts(source, f"{prefix}.experts", experts, hidden, width, parallel)
    return MoeWeights(
        gate=source.take(f"{prefix}.gate.weight", (experts, hidden), wide=True),
        bias=source.take(f"{prefix}.gate.e_score_correction_bias", (experts,), wide=True),
        w13=w13,
        w2=w2,
        shared=_dense(
            source, f"{prefix}.shared_experts", hidden, width * config.num_shared_experts, parallel
        ),
    )


def _dense(
    source: TensorSource, prefix: str, hidden: int, width: int, parallel: Parallel
) -> DenseWeights:
    gate, up = (
        source.take(f"{prefix}.{name}_proj.weight", (width, hidden), cuts=part_of(parallel, 0))
        for name in ("gate", "up")
    )
    down = source.take(f"{prefix}.down_proj.weight", (hidden, width), cuts=part_of(parallel, 1))
    return DenseWeights(w13=torch.cat((gate, up)), w2=down)
