"""One DeepSeek-V4 layer: attention, then experts, each wrapped in hyper-connections.

Shape legend: T tokens, N streams, D hidden size.
"""

from __future__ import annotations

from torch import Tensor

from sluice.models.deepseek_v4.attention import AttentionPlan, LayerBuffers, attention
from sluice.models.deepseek_v4.config import DeepseekV4Config
from sluice.models.deepseek_v4.weights import BlockWeights, HeadWeights
from sluice.models.layers.hyper import hyper_collapse, hyper_expand, hyper_mix
from sluice.models.layers.moe import moe
from sluice.models.layers.norm import accumulation_dtype, rms_norm
from sluice.parallel.group import Parallel


def block(
    streams_TND: Tensor,
    ids_T: Tensor,
    weights: BlockWeights,
    config: DeepseekV4Config,
    plan: AttentionPlan,
    buffers: LayerBuffers,
    parallel: Parallel,
) -> Tensor:
    """The streams after one layer, ``[T, N, D]``; the batch's state is written to ``buffers``."""
    shared = parallel.all_reduce
    mix = hyper_mix(streams_TND, weights.hc_attn, config.hyper)
    x_TD = rms_norm(mix.collapsed_TD, weights.attn_norm, config.norm_eps)
    mixed_TD = shared(attention(x_TD, weights.attn, plan, buffers))
    streams_TND = hyper_expand(mixed_TD, streams_TND, mix)
    mix = hyper_mix(streams_TND, weights.hc_ffn, config.hyper)
    x_TD = rms_norm(mix.collapsed_TD, weights.ffn_norm, config.norm_eps)
    return hyper_expand(shared(moe(x_TD, ids_T, weights.ffn, config.moe)), streams_TND, mix)


def head_logits(streams_RND: Tensor, weights: HeadWeights, config: DeepseekV4Config) -> Tensor:
    """Vocabulary logits of some rows' streams, ``[R, V]`` in at least float32."""
    collapsed_RD = hyper_collapse(streams_RND, weights.collapse, config.hyper)
    wide = accumulation_dtype(streams_RND.dtype)
    normed_RD = rms_norm(collapsed_RD, weights.norm, config.norm_eps).to(wide)
    return weights.vocabulary.logits(normed_RD)
