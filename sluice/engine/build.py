"""Puts an engine together from a checkpoint folder: model, memory for its state, step loop."""

from __future__ import annotations

from pathlib import Path

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.core import EngineCore
from sluice.models.registry import load_model
from sluice.pools.memory import build_memory
from sluice.types import Role


def build_engine(
    model_dir: Path,
    role: Role,
    pool: PoolConfig,
    spec: SpecConfig,
    config: EngineConfig,
    *,
    dtype: str = "float32",
) -> EngineCore:
    """Load, allocate and wire. Blocks for as long as loading takes.

    With ``spec.steps == 0`` the draft is not loaded and its state does not exist. Raises the ``ConfigError`` family.
    """
    model = load_model(model_dir, device=pool.device, dtype=dtype, draft=spec.steps > 0)
    needs = model.target.state_needs(pool.kv_dtype)
    verify_tokens = 1
    if model.draft is not None:
        needs += model.draft.state_needs(pool.kv_dtype)
        verify_tokens = spec.verify_tokens
    memory = build_memory(needs, pool, verify_tokens)
    return EngineCore(role, model.target, model.draft, memory, spec, config, pool)
