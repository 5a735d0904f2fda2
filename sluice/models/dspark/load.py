"""From a folder with a DSPARK draft to the draft of a loaded target."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from sluice.models.capture import ReadableTarget
from sluice.models.dspark.config import load_config
from sluice.models.dspark.model import DSparkDraft, check_target
from sluice.models.dspark.weights import canonical_name, is_shared, read_weights
from sluice.models.loader import Checkpoint
from sluice.parallel.group import SINGLE, Parallel

_FOLDER = "dspark"


def draft_folder(model_dir: Path) -> Path | None:
    """Where a target's checkpoint folder holds its DSPARK draft: ``dspark/`` in it; None if nowhere."""
    folder = model_dir / _FOLDER
    return folder if folder.is_dir() else None


def load_dspark(
    folder: Path,
    target: ReadableTarget,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    parallel: Parallel = SINGLE,
) -> DSparkDraft:
    """Read the draft in ``folder``. Copies of the target's embeddings and vocabulary are skipped.

    Raises ConfigError (broken, or made for another target), UnsupportedModel or CheckpointError; each
    names the key or tensor at fault.
    """
    config = load_config(folder)
    check_target(config, target)
    source = Checkpoint(folder, canonical_name, dtype=dtype, device=device)
    weights = read_weights(source, config, parallel)
    source.finish(ignore=is_shared)
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr(config).encode())
    digest.update(source.digest(lambda name: not is_shared(name), parallel).encode())
    return DSparkDraft(config, weights, target, digest.hexdigest(), parallel)
