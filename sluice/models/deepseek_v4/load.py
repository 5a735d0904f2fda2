"""From a checkpoint folder to a DeepSeek-V4 target and, where its tensors are there, the NextN draft."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.models.base import ModelInfo
from sluice.models.deepseek_v4.config import ARCHITECTURE, DeepseekV4Config, load_config
from sluice.models.deepseek_v4.model import DeepseekV4Nextn, DeepseekV4Target
from sluice.models.deepseek_v4.names import is_draft, official_name
from sluice.models.deepseek_v4.weights import read_nextn, read_target
from sluice.models.loader import Checkpoint
from sluice.parallel.group import SINGLE, Parallel

_TOKENIZER_NAME = "tokenizer.json"


@dataclass(frozen=True)
class LoadedDeepseekV4:
    """What a folder held. ``draft`` is None when the checkpoint has no ``mtp.0`` tensors."""

    target: DeepseekV4Target
    draft: DeepseekV4Nextn | None


def load_deepseek_v4(
    folder: Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    draft: bool = True,
    parallel: Parallel = SINGLE,
) -> LoadedDeepseekV4:
    """Read this rank's part of a checkpoint. ``draft=False`` leaves its draft layer out.

    Raises ConfigError, UnsupportedModel or CheckpointError; each names the key or tensor at fault.
    """
    config = load_config(folder)
    source = Checkpoint(folder, official_name, dtype=dtype, device=device)
    with_draft = draft and config.num_nextn_layers == 1 and any(map(is_draft, source.names()))
    target_weights = read_target(source, config, parallel)
    nextn = None
    if with_draft:
        nextn = DeepseekV4Nextn(
            config, read_nextn(source, config, target_weights, parallel), parallel
        )
    # transformers saves no draft but keeps the config's count, and ignores a draft on load.
    source.finish(ignore=lambda name: is_draft(name) and not with_draft)
    info = _info(folder, config, source, parallel, has_draft=with_draft)
    return LoadedDeepseekV4(DeepseekV4Target(config, target_weights, info, parallel), nextn)


def _info(
    folder: Path,
    config: DeepseekV4Config,
    source: Checkpoint,
    parallel: Parallel,
    *,
    has_draft: bool,
) -> ModelInfo:
    return ModelInfo(
        architecture=ARCHITECTURE,
        config_digest=_digest(repr(config).encode()),
        weights_digest=source.digest(lambda name: not is_draft(name), parallel),
        tokenizer_digest=_file_digest(folder / _TOKENIZER_NAME),
        vocab_size=config.vocab_size,
        max_model_tokens=config.max_position_tokens,
        window_tokens=config.window_tokens,
        ratios=tuple(config.ratio(layer) for layer in range(config.num_layers)),
        eos_token_ids=config.eos_token_ids,
        has_draft=has_draft,
        draft_digest=source.digest(is_draft, parallel) if has_draft else "",
    )


def _file_digest(path: Path) -> str:
    return _digest(path.read_bytes()) if path.exists() else ""


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
