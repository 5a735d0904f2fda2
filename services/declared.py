"""The layout that a pod with these settings would declare, from its checkpoint's configuration: no weights, no memory.

What only the weights can tell, their digests, is the same text in every answer: two pods that load one checkpoint agree
on it, and a gate that is asked before an install can't know more.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

from services.pod_settings import PodSettings
from sluice.config import SpecConfig
from sluice.engine.describe import DraftIdentity, describe_layout
from sluice.layout.layout import Layout, Parallelism
from sluice.models.base import ModelInfo
from sluice.models.dspark.load import draft_folder
from sluice.models.inventory import DraftNeeds, StateNeeds, read_config_file, read_draft_needs
from sluice.pools.specs import components_of
from sluice.types import Role

NOT_READ = "not read"  # stands for the digest of weights
_CONFIG = "config.json"


def declared_layout(settings: PodSettings, role: Role) -> Layout:
    """Raises ``ConfigError`` and its children, as the pod itself would at its start."""
    folder, pool = settings.model_dir, settings.pool()
    file = read_config_file(folder / _CONFIG)
    needs = file.state_needs(pool.kv_dtype)
    steps = settings.spec_steps
    drafter, algorithm = _drafter(folder, needs, pool.kv_dtype, steps)
    spec = SpecConfig(drafter.steps if drafter else steps or 0)
    info = ModelInfo(
        architecture=file.architecture,
        config_digest=needs.config_digest,
        weights_digest=NOT_READ,
        tokenizer_digest=_tokenizer_digest(folder),
        vocab_size=0,
        max_model_tokens=needs.max_model_tokens,
        window_tokens=needs.window_tokens,
        ratios=needs.ratios,
        eos_token_ids=(),
        has_draft=bool(needs.draft),
        draft_digest=NOT_READ,
    )
    state = (*needs.target, *(drafter.state if drafter else ()))
    components = components_of(state, pool, spec.verify_tokens)
    draft = DraftIdentity(algorithm, NOT_READ) if drafter else None
    whole = describe_layout(role, info, pool, spec, components, draft)
    return replace(whole, parallelism=Parallelism(tensor=settings.tp, context=settings.dcp))


def _drafter(
    folder: Path, needs: StateNeeds, kv_dtype: str, steps: int | None
) -> tuple[DraftNeeds | None, str]:
    """What would draft, and how; None with ``steps`` 0 or without a draft."""
    if steps == 0:
        return None, "none"
    if needs.draft:
        return DraftNeeds(SpecConfig.steps if steps is None else steps, needs.draft), "mtp"
    if (dspark := draft_folder(folder)) is not None:
        return read_draft_needs(dspark / _CONFIG, needs, kv_dtype, steps), "dspark"
    return None, "none"


def _tokenizer_digest(folder: Path) -> str:
    path = folder / "tokenizer.json"
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest() if path.exists() else ""
