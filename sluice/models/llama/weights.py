"""The weights of a Llama or Qwen3 model, read from any ``TensorSource`` by their published names.

Projections that read the same input are stacked, so that each is one matmul. Norms stay float32 in
reduced-precision models. Shapes: D hidden, I MLP width, V vocabulary, H query heads, K key/value heads,
d head width; of ranks that share the model, H, K and I are a rank's own (``LlamaConfig.of_rank``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.models.layers.tokens import TokenTable, take_table
from sluice.models.llama.config import LlamaConfig
from sluice.models.loader import TensorSource
from sluice.parallel.cut import Cuts, part_of, shared_part_of
from sluice.parallel.group import SINGLE, Parallel

VOCABULARY = "lm_head.weight"


@dataclass(frozen=True)
class LayerWeights:
    """One layer. ``wqkv [(H + 2K) d, D]`` query over key over value; ``wo [D, H d]``;
    ``w13 [2I, D]`` gate over up; ``w2 [D, I]``; head norms ``[d]``; biases where the model has them.
    """

    attn_norm: Tensor
    wqkv: Tensor
    bqkv: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    wo: Tensor
    bo: Tensor | None
    mlp_norm: Tensor
    w13: Tensor
    w2: Tensor


@dataclass(frozen=True)
class LlamaWeights:
    """The whole model. ``embed`` and ``vocabulary`` are ``[V, D]``, one table when tied."""

    embed: TokenTable
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    vocabulary: TokenTable


def read_weights(
    source: TensorSource, config: LlamaConfig, parallel: Parallel = SINGLE
) -> LlamaWeights:
    """Take this rank's part of every tensor. ``config`` is the whole model's.

    Errors are the source's (CheckpointError), and ConfigError where ranks can't share equally.
    """
    table = (config.vocab_size, config.hidden_size, parallel)
    embed = take_table(source, "model.embed_tokens.weight", *table)
    return LlamaWeights(
        embed=embed,
        layers=tuple(
            read_layer(source, f"model.layers.{layer}", config, parallel)
            for layer in range(config.num_layers)
        ),
        norm=source.take("model.norm.weight", (config.hidden_size,), wide=True),
        vocabulary=embed if config.tied_embeddings else take_table(source, VOCABULARY, *table),
    )


def not_weights(name: str, config: LlamaConfig) -> bool:
    """Stored tensors that carry nothing: a tied head's copy, frequencies that config.json gives."""
    if name == VOCABULARY:
        return config.tied_embeddings
    return name.endswith("rotary_emb.inv_freq")


def read_layer(
    source: TensorSource, prefix: str, config: LlamaConfig, parallel: Parallel = SINGLE
) -> LayerWeights:
    """One layer's tensors, named ``<prefix>.self_attn...`` and so on.

    What ranks compute of a sublayer is summed afterwards, so the output's bias is the first one's alone.
    """
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    query, key = config.num_heads * head_dim, config.num_kv_heads * head_dim
    attn, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    rows, columns = part_of(parallel, 0), part_of(parallel, 1)
    of_keys = shared_part_of(parallel, 0, config.num_kv_heads)
    qkv = (
        (f"{attn}.q_proj", query, rows),
        (f"{attn}.k_proj", key, of_keys),
        (f"{attn}.v_proj", key, of_keys),
    )
    gate_up = ((f"{mlp}.gate_proj", inner, rows), (f"{mlp}.up_proj", inner, rows))
    biased = config.attention_bias
    bo = source.take(f"{attn}.o_proj.bias", (hidden,)) if biased else None

    def norm(name: str, width: int) -> Tensor:
        return source.take(f"{name}.weight", (width,), wide=True)

    return LayerWeights(
        attn_norm=norm(f"{prefix}.input_layernorm", hidden),
        wqkv=_stacked(source, qkv, hidden),
        bqkv=_stacked_biases(source, qkv) if biased else None,
        q_norm=norm(f"{attn}.q_norm", head_dim) if config.qk_norm else None,
        k_norm=norm(f"{attn}.k_norm", head_dim) if config.qk_norm else None,
        wo=source.take(f"{attn}.o_proj.weight", (hidden, query), cuts=columns),
        bo=bo if parallel.rank == 0 else None,
        mlp_norm=norm(f"{prefix}.post_attention_layernorm", hidden),
        w13=_stacked(source, gate_up, hidden),
        w2=source.take(f"{mlp}.down_proj.weight", (hidden, inner), cuts=columns),
    )


def _stacked(source: TensorSource, parts: Sequence[tuple[str, int, Cuts]], columns: int) -> Tensor:
    return torch.cat(
        [source.take(f"{name}.weight", (rows, columns), cuts=cuts) for name, rows, cuts in parts]
    )


def _stacked_biases(source: TensorSource, parts: Sequence[tuple[str, int, Cuts]]) -> Tensor:
    return torch.cat(
        [source.take(f"{name}.bias", (rows,), cuts=cuts) for name, rows, cuts in parts]
    )
