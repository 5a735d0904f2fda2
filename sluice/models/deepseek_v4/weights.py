"""The weights of a DeepSeek-V4 target and its NextN layer, read from any ``TensorSource``.

Parameters that a reduced-precision model computes with in float32 (norms, hyper-connections, sinks,
gates, compressors, the vocabulary projection) are taken ``wide``. Shapes in ``config.py``'s terms; ranks
that share the model cut heads (with their output groups), experts' widths and the vocabulary, and each
has latents, compressors, indexers and routers whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.models.deepseek_v4.compressor import CompressorWeights
from sluice.models.deepseek_v4.config import DeepseekV4Config, LayerKind
from sluice.models.layers.experts import take_experts
from sluice.models.layers.hyper import HyperWeights
from sluice.models.layers.moe import MoeWeights
from sluice.models.layers.tokens import TokenTable, take_table
from sluice.models.loader import TensorSource
from sluice.parallel.cut import Cut, Cuts, part_of, share, shared_part_of
from sluice.parallel.group import SINGLE, Parallel


@dataclass(frozen=True)
class IndexerWeights:
    """``wq_b [HI*dI, rq]``, ``weights_proj [HI, D]`` and the keys' own overlapping compressor."""

    wq_b: Tensor
    weights_proj: Tensor
    compressor: CompressorWeights


@dataclass(frozen=True)
class AttentionWeights:
    """Projections of one attention layer; ``wo_a [G, ro, H*d/G]``. Compressor per layer kind."""

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor
    attn_sink: Tensor
    wo_a: Tensor
    wo_b: Tensor
    compressor: CompressorWeights | None
    indexer: IndexerWeights | None


@dataclass(frozen=True)
class BlockWeights:
    """One layer: two hyper-connected sublayers with their norms."""

    hc_attn: HyperWeights
    attn_norm: Tensor
    attn: AttentionWeights
    hc_ffn: HyperWeights
    ffn_norm: Tensor
    ffn: MoeWeights


@dataclass(frozen=True)
class HeadWeights:
    """From streams to logits: collapse, norm, and the (shared) vocabulary projection ``[V, D]``."""

    collapse: HyperWeights
    norm: Tensor
    vocabulary: TokenTable


@dataclass(frozen=True)
class TargetWeights:
    """The whole target. ``embed [V, D]``."""

    embed: TokenTable
    layers: tuple[BlockWeights, ...]
    head: HeadWeights


@dataclass(frozen=True)
class NextnWeights:
    """The draft layer: glue, one window block, and a head that shares the target's vocabulary."""

    embed: TokenTable
    enorm: Tensor
    hnorm: Tensor
    e_proj: Tensor
    h_proj: Tensor
    block: BlockWeights
    head: HeadWeights


def read_target(
    source: TensorSource, config: DeepseekV4Config, parallel: Parallel = SINGLE
) -> TargetWeights:
    """Take this rank's part of every target tensor. ``config`` is the whole model's.

    Errors are the source's (CheckpointError), and ConfigError where ranks can't share equally.
    """
    vocab, hidden = config.vocab_size, config.hidden_size
    return TargetWeights(
        embed=take_table(source, "embed.weight", vocab, hidden, parallel),
        layers=tuple(
            _block(
                source,
                f"layers.{layer}",
                config,
                config.layer_kinds[layer],
                config.hash_layers[layer],
                parallel,
            )
            for layer in range(config.num_layers)
        ),
        head=HeadWeights(
            collapse=_hyper(source, "hc_head", config, head=True),
            norm=source.take("norm.weight", (hidden,), wide=True),
            vocabulary=take_table(source, "head.weight", vocab, hidden, parallel, wide=True),
        ),
    )


def read_nextn(
    source: TensorSource,
    config: DeepseekV4Config,
    target: TargetWeights,
    parallel: Parallel = SINGLE,
) -> NextnWeights:
    """Take the draft layer ``mtp.0.*``; embedding and vocabulary projection are the target's."""
    hidden = config.hidden_size
    return NextnWeights(
        embed=target.embed,
        enorm=source.take("mtp.0.enorm.weight", (hidden,), wide=True),
        hnorm=source.take("mtp.0.hnorm.weight", (hidden,), wide=True),
        e_proj=source.take("mtp.0.e_proj.weight", (hidden, hidden)),
        h_proj=source.take("mtp.0.h_proj.weight", (hidden, hidden)),
        block=_block(source, "mtp.0", config, LayerKind.WINDOW, False, parallel),
        head=HeadWeights(
            collapse=_hyper(source, "mtp.0.hc_head", config, head=True),
            norm=source.take("mtp.0.norm.weight", (hidden,), wide=True),
            vocabulary=target.head.vocabulary,
        ),
    )


def _block(
    source: TensorSource,
    prefix: str,
    config: DeepseekV4Config,
    kind: LayerKind,
    hashed: bool,
    parallel: Parallel,
) -> BlockWeights:
    hidden = (config.hidden_size,)
    return BlockWeights(
        hc_attn=_hyper(source, f"{prefix}.hc_attn", config),
        attn_norm=source.take(f"{prefix}.attn_norm.weight", hidden, wide=True),
        attn=_attention(source, f"{prefix}.attn", config, kind, parallel),
        hc_ffn=_hyper(source, f"{prefix}.hc_ffn", config),
        ffn_norm=source.take(f"{prefix}.ffn_norm.weight", hidden, wide=True),
        ffn=_moe(source, f"{prefix}.ffn", config, hashed, parallel),
    )


def _hyper(
    source: TensorSource, prefix: str, config: DeepseekV4Config, *, head: bool = False
) -> HyperWeights:
    n = config.hyper.num_streams
    mixes, scales = (n, 1) if head else ((2 + n) * n, 3)
    return HyperWeights(
        fn=source.take(f"{prefix}_fn", (mixes, n * config.hidden_size), wide=True),
        base=source.take(f"{prefix}_base", (mixes,), wide=True),
        scale=source.take(f"{prefix}_scale", (scales,), wide=True),
    )


def _attention(
    source: TensorSource,
    prefix: str,
    config: DeepseekV4Config,
    kind: LayerKind,
    parallel: Parallel,
) -> AttentionWeights:
    hidden, rank, head_dim = config.hidden_size, config.q_lora_rank, config.head_dim
    groups, out_rank = config.o_groups, config.o_lora_rank
    all_heads = config.num_heads * head_dim
    share("num_attention_heads", config.num_heads, parallel.size)
    rows, of_group = part_of(parallel, 0), shared_part_of(parallel, 0, groups)
    wo_a = source.take(
        f"{prefix}.wo_a.weight",
        (groups * out_rank, all_heads // groups),
        cuts=(*of_group, *_within_group(parallel, groups)),
    )
    ratio = config.ratio_of(kind)
    return AttentionWeights(
        wq_a=source.take(f"{prefix}.wq_a.weight", (rank, hidden)),
        q_norm=source.take(f"{prefix}.q_norm.weight", (rank,), wide=True),
        wq_b=source.take(f"{prefix}.wq_b.weight", (all_heads, rank), cuts=rows),
        wkv=source.take(f"{prefix}.wkv.weight", (head_dim, hidden)),
        kv_norm=source.take(f"{prefix}.kv_norm.weight", (head_dim,), wide=True),
        attn_sink=source.take(f"{prefix}.attn_sink", (config.num_heads,), wide=True, cuts=rows),
        wo_a=wo_a.unflatten(0, (-1, out_rank)),
        wo_b=source.take(
            f"{prefix}.wo_b.weight",
            (hidden, groups * out_rank),
            cuts=shared_part_of(parallel, 1, groups),
        ),
        compressor=(
            None
            if kind is LayerKind.WINDOW
            else _compressor(source, f"{prefix}.compressor", hidden, head_dim, ratio, kind)
        ),
        indexer=_indexer(source, f"{prefix}.indexer", config) if kind is LayerKind.CSA else None,
    )


def _within_group(parallel: Parallel, groups: int) -> Cuts:
    """With more ranks than output groups, a rank has some of a group's heads: columns of its ``wo_a``.
    The low-rank vectors are then partial sums, and so is what ``wo_b`` makes of them.
    """
    if parallel.size <= groups:
        return ()
    ways = parallel.size // groups
    return (Cut(1, parallel.rank % ways, ways),)


def _compressor(
    source: TensorSource, prefix: str, hidden: int, width: int, ratio: int, kind: LayerKind
) -> CompressorWeights:
    channels = 2 * width if kind is LayerKind.CSA else width
    return CompressorWeights(
        wkv=source.take(f"{prefix}.wkv.weight", (channels, hidden), wide=True),
        wgate=source.take(f"{prefix}.wgate.weight", (channels, hidden), wide=True),
        norm=source.take(f"{prefix}.norm.weight", (width,), wide=True),
        ape=source.take(f"{prefix}.ape", (ratio, channels), wide=True),
    )


def _indexer(source: TensorSource, prefix: str, config: DeepseekV4Config) -> IndexerWeights:
    heads, width = config.num_index_heads, config.index_dim
    return IndexerWeights(
        wq_b=source.take(f"{prefix}.wq_b.weight", (heads * width, config.q_lora_rank)),
        weights_proj=source.take(f"{prefix}.weights_proj.weight", (heads, config.hidden_size)),
        compressor=_compressor(
            source,
            f"{prefix}.compressor",
            config.hidden_size,
            width,
            config.csa_ratio,
            LayerKind.CSA,
        ),
    )


def _moe(
    source: TensorSource, prefix: str, config: DeepseekV4Config, hashed: bool, parallel: Parallel
) -> MoeWeights:
    hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.num_experts
    table_shape = (config.vocab_size, config.moe.experts_per_token)
    w13, w2 = take_experts(source, f"{prefix}.experts", experts, hidden, width, parallel)
    shared = f"{prefix}.shared_experts"
    return MoeWeights(
        gate=source.take(f"{prefix}.gate.weight", (experts, hidden), wide=True),
        bias=None if hashed else source.take(f"{prefix}.gate.bias", (experts,), wide=True),
        tid2eid=source.take_ids(f"{prefix}.gate.tid2eid", table_shape) if hashed else None,
        w13=w13,
        w2=w2,
        shared_w13=torch.cat(
            [
                source.take(f"{shared}.{name}.weight", (width, hidden), cuts=part_of(parallel, 0))
                for name in ("w1", "w3")
            ]
        ),
        shared_w2=source.take(f"{shared}.w2.weight", (hidden, width), cuts=part_of(parallel, 1)),
    )
