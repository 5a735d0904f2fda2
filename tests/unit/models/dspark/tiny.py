"""Tiny random Qwen3 targets and DSPARK drafts: raw configs, raw tensors, and both loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sluice.config import PoolConfig
from sluice.errors import CheckpointError
from sluice.models.base import ForwardBatch, ModelInfo, Segment
from sluice.models.capture import HiddenCapture, ReadableTarget
from sluice.models.config_fields import ConfigFields
from sluice.models.dspark.config import parse_config
from sluice.models.dspark.model import DSparkDraft
from sluice.models.dspark.weights import read_weights as read_draft
from sluice.models.llama.config import parse_config as parse_llama
from sluice.models.llama.model import LlamaTarget
from sluice.models.llama.weights import read_weights as read_llama
from sluice.parallel.cut import Cuts, cut
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.types import RequestId

VOCAB, HIDDEN, TARGET_LAYERS, BLOCK = 29, 20, 4, 4
# No width is another's: 4 / 2 heads of 6 in the draft, rank 5, 3 captured layers.
TARGET_CONFIG: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": TARGET_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "eos_token_id": 0,
}
DRAFT_CONFIG: dict[str, object] = {
    **TARGET_CONFIG,
    "architectures": ["Qwen3DSparkModel"],
    "num_hidden_layers": 2,
    "intermediate_size": 14,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "rope_theta": 5000.0,
    "block_size": BLOCK,
    "target_layer_ids": [2, 0, 3],
    "num_target_layers": TARGET_LAYERS,
    "mask_token_id": 28,
    "markov_rank": 5,
    "markov_head_type": "vanilla",
}


class Tensors:
    """A ``TensorSource`` over a dict, which makes up what it does not have."""

    def __init__(self, seed: int, made: dict[str, Tensor] | None = None) -> None:
        self.made: dict[str, Tensor] = {} if made is None else made
        self._generator = torch.Generator().manual_seed(seed)

    def has(self, name: str) -> bool:
        return True

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, cuts: Cuts = ()
    ) -> Tensor:
        if name not in self.made:
            value = torch.randn(shape, generator=self._generator)
            norm = name.endswith("norm.weight")
            # Spread widely, so that a mixed-up axis or a dropped term moves every logit.
            scale = 1.5 if "markov_w" in name else 0.5
            self.made[name] = 1 + 0.3 * value if norm else value * scale
        tensor = self.made[name]
        if tuple(tensor.shape) != shape:
            raise CheckpointError(f"{name}: {tuple(tensor.shape)}, expected {shape}")
        return cut(tensor, cuts)

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        raise AssertionError("no integer tensors here")


INFO = ModelInfo(
    architecture="Qwen3ForCausalLM",
    config_digest="c",
    weights_digest="w",
    tokenizer_digest="t",
    vocab_size=VOCAB,
    max_model_tokens=512,
    window_tokens=0,
    ratios=(1,) * TARGET_LAYERS,
    eos_token_ids=(0,),
    has_draft=False,
    draft_digest="",
)


def make_target(seed: int = 1, **changes: object) -> tuple[LlamaTarget, dict[str, Tensor]]:
    config = parse_llama(ConfigFields({**TARGET_CONFIG, **changes}))
    source = Tensors(seed)
    weights = read_llama(source, config)
    return LlamaTarget(config, weights, INFO), source.made


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and what they were made from."""

    target: ReadableTarget
    draft: DSparkDraft
    raw: Mapping[str, object]
    tensors: Mapping[str, Tensor]
    target_tensors: Mapping[str, Tensor]


def make_pair(**changes: object) -> Pair:
    target, target_tensors = make_target()
    return replace(pair_on(target, **changes), target_tensors=target_tensors)


def pair_on(target: ReadableTarget, **changes: object) -> Pair:
    """A draft for any target; the changes must make it fit."""
    raw = {**DRAFT_CONFIG, **changes}
    config = parse_config(raw)
    source = Tensors(2)
    draft = DSparkDraft(config, read_draft(source, config), target, "digest")
    return Pair(target, draft, raw, source.made, {})


def shallower(pair: Pair, layers: int) -> LlamaTarget:
    """The target cut off after its first ``layers`` layers: its output is their residual stream."""
    changed = {**TARGET_CONFIG, "num_hidden_layers": layers}
    config = parse_llama(ConfigFields(changed))
    weights = read_llama(Tensors(0, dict(pair.target_tensors)), config)
    return LlamaTarget(config, weights, replace(INFO, ratios=(1,) * layers))


def pool_config(**changes: object) -> PoolConfig:
    plain = PoolConfig(page_tokens=8, num_pages=80, num_slots=12, fill="nan")
    return replace(plain, **changes)  # type: ignore[arg-type]


def memory_of(pair: Pair, config: PoolConfig | None = None) -> Memory:
    config = config or pool_config()
    needs = pair.target.state_needs(config.kv_dtype) + pair.draft.state_needs(config.kv_dtype)
    return build_memory(needs, config, pair.draft.config.verify_tokens)


def captured(pair: Pair, memory: Memory, segments: Sequence[Segment]) -> Tensor:
    """Run the target over the segments; what the draft's layers saw, ``[T, C * E]``."""
    capture = HiddenCapture(pair.draft.config.target_layer_ids)
    pair.target.forward(ForwardBatch.build(segments, memory), memory, capture)
    return capture.hidden()


def inject(
    pair: Pair, memory: Memory, tables: RequestTables, ids: Sequence[int], chunks: Sequence[int]
) -> Tensor:
    """Read a prompt in chunks with target and draft; returns all captured streams."""
    streams = []
    for size in chunks:
        start = tables.kv_len
        memory.extend(tables, start + size)
        segment = Segment(tables, start, tuple(ids[start : start + size]))
        streams.append(captured(pair, memory, [segment]))
        pair.draft.inject(ForwardBatch.build([segment], memory), streams[-1], memory)
        tables.kv_len = start + size
    return torch.cat(streams) if streams else torch.zeros(0, 3 * HIDDEN)


def opened(memory: Memory, name: str, max_tokens: int = 60) -> RequestTables:
    return memory.open(RequestId(name), max_tokens)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return tuple(torch.randint(1, VOCAB - 1, (length,), generator=generator).tolist())
