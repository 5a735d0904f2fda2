"""An engine from a checkpoint folder: model, memory and core put together for one role."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.core import EngineCore
from sluice.engine.ranks import LeadingCore
from sluice.grammar.compiler import FollowersGrammars, Grammars, grammars_of
from sluice.models.base import TargetModel
from sluice.models.kimi_linear.config import LayerKind
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.registry import load_model
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.memory import build_memory
from sluice.pools.solver import attention_workspace_bytes, solve
from sluice.spec.build import own_steps
from sluice.transfer.staging import staging_slots
from sluice.transfer.writes import GROUP_BYTES
from sluice.types import Role

log = logging.getLogger(__name__)


def build_engine(
    model_dir: Path,
    role: Role,
    pool: PoolConfig,
    spec: SpecConfig | None,
    config: EngineConfig,
    *,
    dtype: str = "float32",
    parallel: Parallel = SINGLE,
    context: ContextParallel = NO_CONTEXT,
) -> EngineCore:
    """Load the checkpoint onto ``pool.device`` to compute in ``dtype``, and reserve its state memory.

    ``spec`` None speculates as the checkpoint's draft was made for. The draft is loaded when the
    checkpoint has one and ``spec.steps > 0``; rings are sized by ``spec`` in any case, so that a pod
    without a draft still agrees on them with one that has it. Ranks that share the model each build one
    with the same settings, the first of them a ``LeadingCore``. Raises ``ConfigError`` and its children.
    """
    wanted = spec is None or spec.steps > 0
    pool = replace(pool, context=context.size, context_rank=context.rank)
    loaded = load_model(
        model_dir,
        device=pool.device,
        dtype=dtype,
        draft=wanted,
        parallel=parallel,
        context=context,
    )
    if spec is None:
        spec = SpecConfig(own_steps(loaded.draft))
    needs = loaded.target.state_needs(pool.kv_dtype)
    if loaded.draft is not None:
        needs += loaded.draft.state_needs(pool.kv_dtype)
    if pool.budget_bytes:
        rows = max(config.max_batch_tokens, spec.verify_tokens)
        taken = _workspaces(loaded.target, context, rows, config.max_running * spec.verify_tokens)
        if role is Role.PREFILL:
            staged = staging_slots(pool.budget_bytes, GROUP_BYTES) * GROUP_BYTES
            taken.append(("transfer staging", staged))
        solution = solve(needs, pool, spec.verify_tokens, pool.budget_bytes, taken)
        log.info("state memory of this rank:\n%s", solution.text())
        pool = replace(pool, num_pages=solution.num_pages)
    memory = build_memory(needs, pool, spec.verify_tokens)
    info = loaded.target.info
    grammars: Grammars = FollowersGrammars()
    if parallel.rank == 0:
        grammars = grammars_of(model_dir, info.vocab_size, info.eos_token_ids)
    core = LeadingCore if parallel.size > 1 and parallel.rank == 0 else EngineCore
    return core(role, loaded.target, loaded.draft, memory, spec, config, pool, grammars, parallel)


def _workspaces(
    target: TargetModel, context: ContextParallel, rows: int, verified: int
) -> list[tuple[str, int]]:
    """What a forward of ``rows`` rows, of which ``verified`` are drafts, takes beside the state."""
    if not isinstance(target, KimiLinearTarget):
        return []
    mla, kda = target.local.mla, target.local.kda
    heads = mla.num_heads * context.size
    per_token = kda.num_heads * (2 * kda.key_dim + kda.value_dim + 1 + kda.head_channels) * 4
    layers = len(target.local.layers_of(LayerKind.KDA))
    return [
        ("attention's partial results", attention_workspace_bytes(heads, rows, mla.latent_dim)),
        ("verified writes", layers * verified * per_token),
    ]
