"""From a checkpoint folder to a Kimi Linear target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from sluice.models.base import ModelInfo
from sluice.models.kimi_linear.config import (
    ARCHITECTURE,
    KimiLinearConfig,
    LayerKind,
    load_config,
)
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.kimi_linear.names import canonical_name
from sluice.models.kimi_linear.weights import read_target
from sluice.models.loader import Checkpoint
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.group import SINGLE, Parallel

_TOKENIZER_NAME = "tokenizer.json"


def load_kimi_linear(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    parallel: Parallel = SINGLE,
    context: ContextParallel = NO_CONTEXT,
) -> KimiLinearTarget:
    """Read this rank's part of a checkpoint.

    Raises ConfigError, UnsupportedModel or CheckpointError; each names the key or tensor at fault.
    """
    config = load_config(folder)
    source = Checkpoint(folder, canonical_name, dtype=dtype, device=device)
    weights = read_target(source, config, parallel, context)
    source.finish()
    return KimiLinearTarget(
        config, weights, _info(folder, config, source, parallel), parallel, context
    )


def _info(
    folder: Path, config: KimiLinearConfig, source: Checkpoint, parallel: Parallel
) -> ModelInfo:
    tokenizer = folder / _TOKENIZER_NAME
    return ModelInfo(
        architecture=ARCHITECTURE,
        config_digest=_digest(repr(config).encode()),
        weights_digest=source.digest(parallel=parallel),
        tokenizer_digest=_digest(tokenizer.read_bytes()) if tokenizer.exists() else "",
        vocab_size=config.vocab_size,
        max_model_tokens=config.max_position_tokens,
        window_tokens=0,
        # 1 = every token is kept; 0 = nothing per token.
        ratios=tuple(int(kind is LayerKind.MLA) for kind in config.layer_kinds),
        eos_token_ids=config.eos_token_ids,
        has_draft=False,
        draft_digest="",
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
