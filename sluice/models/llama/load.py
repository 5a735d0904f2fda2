"""From a checkpoint folder to a Llama or Qwen3 model. Neither family has a draft of its own."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from sluice.models.base import ModelInfo
from sluice.models.llama.config import LlamaConfig, load_config
from sluice.models.llama.model import LlamaTarget
from sluice.models.llama.weights import not_weights, read_weights
from sluice.models.loader import Checkpoint
from sluice.parallel.group import SINGLE, Parallel

_TOKENIZER_NAME = "tokenizer.json"


def load_llama(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    parallel: Parallel = SINGLE,
) -> LlamaTarget:
    """Read this rank's part of a checkpoint: one safetensors file, or shards with an index.

    Raises ConfigError, UnsupportedModel or CheckpointError; each names the key or tensor at fault.
    """
    config = load_config(folder)
    source = Checkpoint(folder, lambda name: name, dtype=dtype, device=device)
    weights = read_weights(source, config, parallel)
    source.finish(ignore=lambda name: not_weights(name, config))
    return LlamaTarget(config, weights, _info(folder, config, source, parallel), parallel)


def _info(folder: Path, config: LlamaConfig, source: Checkpoint, parallel: Parallel) -> ModelInfo:
    tokenizer = folder / _TOKENIZER_NAME
    return ModelInfo(
        architecture=config.architecture,
        config_digest=_digest(repr(config).encode()),
        weights_digest=source.digest(lambda name: not not_weights(name, config), parallel),
        tokenizer_digest=_digest(tokenizer.read_bytes()) if tokenizer.exists() else "",
        vocab_size=config.vocab_size,
        max_model_tokens=config.max_position_tokens,
        window_tokens=0,
        ratios=(1,) * config.num_layers,  # every token of every layer is kept
        eos_token_ids=config.eos_token_ids,
        has_draft=False,
        draft_digest="",
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
