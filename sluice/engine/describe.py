"""A pod's layout, put together from what model, pools and configuration say about themselves."""

from __future__ import annotations

from collections.abc import Sequence

from sluice.config import PoolConfig, SpecConfig
from sluice.layout.component import Component, Coverage, Kind, Owner
from sluice.layout.layout import Geometry, Layout, ModelIdentity, Parallelism, SpecIdentity
from sluice.models.base import ModelInfo
from sluice.types import Role

BYTE_LAYOUT = "rows"


def describe_layout(
    role: Role,
    info: ModelInfo,
    pool: PoolConfig,
    spec: SpecConfig,
    components: Sequence[Component],
) -> Layout:
    """``spec`` with 0 steps means that this pod runs no draft."""
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
            byte_layout=BYTE_LAYOUT,
        ),
        parallelism=Parallelism(),
        spec=_spec_identity(info, spec, components),
        components=tuple(components),
    )


def _spec_identity(
    info: ModelInfo, spec: SpecConfig, components: Sequence[Component]
) -> SpecIdentity:
    if spec.steps == 0:
        return SpecIdentity(
            algorithm="none", steps=0, draft_tokens=1, draft_digest="", draft_ratios=()
        )
    layers = {
        entry.layer_id
        for component in components
        if component.owner is Owner.DRAFT and component.coverage is not Coverage.LAST
        for entry in component.entries
    }
    return SpecIdentity(
        algorithm="mtp",
        steps=spec.steps,
        draft_tokens=spec.verify_tokens,
        draft_digest=info.draft_digest,
        draft_ratios=(0,) * len(layers),  # the pools have refused any other draft
    )
