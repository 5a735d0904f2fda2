"""A pod's layout: everything two pods must agree on before a byte of state may move."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.layout.component import Component

WIRE_VERSION = 2


@dataclass(frozen=True)
class ModelIdentity:
    """Which model the state belongs to. Digests are hex strings of the files' contents."""

    architecture: str
    config_digest: str
    weights_digest: str
    tokenizer_digest: str


@dataclass(frozen=True)
class Geometry:
    """How positions map to rows."""

    page_tokens: int
    window_tokens: int
    compression_ratios: tuple[int, ...]  # one a target layer
    pool_mode: str  # "paged" or "unified"
    ring_rows: int  # window ring rows a request (unified), 0 in paged mode
    kv_dtype: str
    # "rows": row-major rows of row_shape, little-endian; a block-scaled layout gets its own name
    byte_layout: str


@dataclass(frozen=True)
class Parallelism:
    tensor: int = 1
    context: int = 1
    rank: int = 0


@dataclass(frozen=True)
class SpecIdentity:
    """Speculation as negotiated. ``algorithm`` "none" means no draft on this pod."""

    algorithm: str  # "none", "mtp", "dspark"
    steps: int
    draft_tokens: int  # tokens verified a step
    draft_digest: str
    draft_ratios: tuple[int, ...]  # ratio of each draft layer: 0 window-only, 1 every token kept


@dataclass(frozen=True)
class Layout:
    """The ordered components of a pod plus everything that must match. ``role`` is informative."""

    role: str
    model: ModelIdentity
    geometry: Geometry
    parallelism: Parallelism
    spec: SpecIdentity
    components: tuple[Component, ...]
    wire_version: int = WIRE_VERSION

    def component(self, name: str) -> Component:
        for component in self.components:
            if component.name == name:
                return component
        raise KeyError(name)
