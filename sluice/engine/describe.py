"""A pod's layout, put together from what model, pools and configuration say about themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.config import PoolConfig, SpecConfig
from sluice.layout.component import SCALE_KINDS, Component, Coverage, Kind, Owner
from sluice.layout.layout import Geometry, Layout, ModelIdentity, Parallelism, SpecIdentity
from sluice.models.base import ModelInfo
from sluice.pools.block_scale import BLOCK_VALUES
from sluice.types import Role

BYTE_LAYOUT = "rows"
BLOCK_SCALED_BYTE_LAYOUT = f"rows+ue8m0/{BLOCK_VALUES}"  # scale format / values a scale


@dataclass(frozen=True)
class DraftIdentity:
    """Which draft a pod runs: how it drafts, and the digest of its weights."""

    algorithm: str
    digest: str


def describe_layout(
    role: Role,
    info: ModelInfo,
    pool: PoolConfig,
    spec: SpecConfig,
    components: Sequence[Component],
    draft: DraftIdentity | None,
) -> Layout:
    """``draft`` None: this pod runs no draft, whatever ``spec`` says."""
    scaled = any(c.kind in SCALE_KINDS for c in components)
    rings = [c.rows_per_item for c in components if c.kind is Kind.SWA_RING]
    return Layout(
        role=role.value,
        model=ModelIdentity(
            architecture=info.architecture,
            config_digest=info.config_digest,
            weights_digest=info.weights_digest,
            tokenizer_digest=info.tokenizer_digest,
        ),
        geometry=Geometry(
            page_tokens=pool.page_tokens,
            window_tokens=info.window_tokens,
            compression_ratios=info.ratios,
            pool_mode=pool.mode.value,
            ring_rows=max(rings, default=0),
            kv_dtype=pool.kv_dtype,
            byte_layout=BLOCK_SCALED_BYTE_LAYOUT if scaled else BYTE_LAYOUT,
        ),
        parallelism=Parallelism(),
        spec=_spec_identity(spec, components, draft),
        components=tuple(components),
    )


def _spec_identity(
    spec: SpecConfig, components: Sequence[Component], draft: DraftIdentity | None
) -> SpecIdentity:
    if draft is None:
        return SpecIdentity(
            algorithm="none", steps=0, draft_tokens=1, draft_digest="", draft_ratios=()
        )
    # The pools have refused any other draft than one that keeps windows or one that keeps each token.
    ratios = {
        entry.layer_id: component.tokens_per_row if component.coverage is Coverage.HISTORY else 0
        for component in components
        if component.owner is Owner.DRAFT and component.coverage is not Coverage.LAST
        for entry in component.entries
    }
    return SpecIdentity(
        algorithm=draft.algorithm,
        steps=spec.steps,
        draft_tokens=spec.verify_tokens,
        draft_digest=draft.digest,
        draft_ratios=tuple(ratios[layer] for layer in sorted(ratios)),
    )
