"""From a checkpoint folder to a loaded model, by the architecture its config.json names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from sluice.errors import ConfigError, UnsupportedModel
from sluice.models.base import DraftModel, TargetModel
from sluice.models.capture import ReadableTarget
from sluice.models.deepseek_v4.config import ARCHITECTURE as DEEPSEEK_V4
from sluice.models.deepseek_v4.load import load_deepseek_v4
from sluice.models.dspark.load import draft_folder, load_dspark
from sluice.models.dspark.model import DSparkDraft
from sluice.models.kimi_linear.config import ARCHITECTURE as KIMI_LINEAR
from sluice.models.kimi_linear.load import load_kimi_linear
from sluice.models.llama.config import LLAMA, QWEN3
from sluice.models.llama.load import load_llama
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.group import SINGLE, Parallel


@dataclass(frozen=True)
class LoadedModel:
    """A target and, where its checkpoint has one and it was asked for, its draft.

    A NextN layer is among the checkpoint's tensors, a DSPARK draft in a folder ``dspark/`` inside it.
    """

    target: TargetModel
    draft: DraftModel | DSparkDraft | None


@dataclass(frozen=True)
class _Wanted:
    """Which checkpoint, this rank's part of it, and how."""

    folder: Path
    dtype: torch.dtype
    device: str
    draft: bool
    parallel: Parallel
    context: ContextParallel


Loader = Callable[[_Wanted], LoadedModel]


def _deepseek_v4(wanted: _Wanted) -> LoadedModel:
    _refuse_context(wanted)
    loaded = load_deepseek_v4(
        wanted.folder,
        dtype=wanted.dtype,
        device=wanted.device,
        draft=wanted.draft,
        parallel=wanted.parallel,
    )
    return LoadedModel(loaded.target, loaded.draft)


def _llama(wanted: _Wanted) -> LoadedModel:
    _refuse_context(wanted)
    target = load_llama(
        wanted.folder, dtype=wanted.dtype, device=wanted.device, parallel=wanted.parallel
    )
    return LoadedModel(target, _dspark(wanted, target))


def _kimi_linear(wanted: _Wanted) -> LoadedModel:
    target = load_kimi_linear(
        wanted.folder,
        dtype=wanted.dtype,
        device=wanted.device,
        parallel=wanted.parallel,
        context=wanted.context,
    )
    return LoadedModel(target, _dspark(wanted, target))


def _refuse_context(wanted: _Wanted) -> None:
    if wanted.context.size > 1:
        raise ConfigError(
            f"{wanted.folder.name}: context parallelism of {wanted.context.size} ranks is for models that keep "
            "latents of every token (Kimi Linear)",
            stage="load",
            remedy="set the pod's DCP to 1",
        )


def _dspark(wanted: _Wanted, target: ReadableTarget) -> DSparkDraft | None:
    where = draft_folder(wanted.folder) if wanted.draft else None
    if where is None:
        return None
    return load_dspark(
        where, target, dtype=wanted.dtype, device=wanted.device, parallel=wanted.parallel
    )


LOADERS: Mapping[str, Loader] = {
    DEEPSEEK_V4: _deepseek_v4,
    KIMI_LINEAR: _kimi_linear,
    LLAMA: _llama,
    QWEN3: _llama,
}


def load_model(
    model_dir: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    draft: bool = True,
    parallel: Parallel = SINGLE,
    context: ContextParallel = NO_CONTEXT,
) -> LoadedModel:
    """Load this rank's part of the checkpoint in ``model_dir``; ``draft=False`` leaves its draft layer out.

    Raises ``UnsupportedModel`` for an architecture nobody registered, ``ConfigError`` for a bad ``dtype``, and
    whatever the family's loader raises.
    """
    architecture = _architecture(model_dir)
    loader = LOADERS.get(architecture)
    if loader is None:
        raise UnsupportedModel(
            f"{model_dir.name}: architecture {architecture!r} is not supported",
            stage="load",
            remedy=f"supported: {', '.join(sorted(LOADERS))}",
        )
    return loader(_Wanted(model_dir, _dtype(dtype), device, draft, parallel, context))


def _architecture(model_dir: Path) -> str:
    path = model_dir / "config.json"
    try:
        names = json.loads(path.read_text()).get("architectures") or [""]
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"can't read {path}: {error}", stage="load", remedy="name a checkpoint folder"
        ) from error
    return str(names[0])


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(
            f"dtype {name!r} is not a floating point type of torch",
            stage="load",
            remedy="float32, bfloat16 or float16",
        )
    return dtype
