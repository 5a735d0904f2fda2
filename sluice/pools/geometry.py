"""Ring capacities, the geometry of a part's state, and the rules tying a draft to its target."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sluice.config import PoolConfig, PoolMode
from sluice.errors import GeometryError
from sluice.layout.component import Coverage, Owner
from sluice.pools.base import BufferSpec, WindowMap


def window_ring_rows(window_tokens: int, verify_tokens: int) -> int:
    """Rows of a window ring: after T were written, the first of them still sees W - 1 old ones."""
    return window_tokens + verify_tokens - 1


def overlap_ring_rows(ratio: int, verify_tokens: int) -> int:
    """Rows of an overlap tail: two blocks plus T - 1, rounded up to a power of two."""
    return 1 << (2 * ratio + verify_tokens - 2).bit_length()


def open_block_ring_rows(ratio: int, verify_tokens: int) -> int:
    """Rows of an open block's ring: the block plus T - 1 tokens that may be rejected."""
    return ratio + verify_tokens - 1


@dataclass(frozen=True)
class PoolGeometry:
    """How the state of a target or of a draft is laid out in the pools.

    ``layer_ratios``: one a layer, 0 = window only, else the finest compression (1 = every token is
    kept).
    """

    mode: PoolMode
    page_tokens: int
    window_tokens: int  # 0 = no window
    ring_rows: int  # window ring rows a request; 0 in paged mode
    ring_capacity: int  # window ring rows of all slots; 0 in paged mode
    layer_ratios: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"mode={self.mode.value} page={self.page_tokens} window={self.window_tokens} "
            f"ring_rows={self.ring_rows} ring_capacity={self.ring_capacity} "
            f"ratios={list(self.layer_ratios)}"
        )


@dataclass(frozen=True)
class PoolBinding:
    """A part's geometry and, in paged mode, the full-to-window mapping its rows are found by."""

    geometry: PoolGeometry
    window_map: WindowMap | None = None


def geometry_of(
    specs: Sequence[BufferSpec], config: PoolConfig, verify_tokens: int
) -> PoolGeometry:
    """The geometry of one owner's specs. Raises ``GeometryError`` for several windows."""
    windows = sorted({s.window_tokens for s in specs if s.coverage is Coverage.WINDOW})
    if len(windows) > 1:
        raise GeometryError(f"windows of {windows} tokens in one model; one window is supported")
    window = windows[0] if windows else 0
    ringed = config.mode is PoolMode.UNIFIED and window > 0
    ring_rows = window_ring_rows(window, verify_tokens) if ringed else 0
    return PoolGeometry(
        mode=config.mode,
        page_tokens=config.page_tokens,
        window_tokens=window,
        ring_rows=ring_rows,
        ring_capacity=ring_rows * (config.num_slots + 1),
        layer_ratios=_layer_ratios(specs),
    )


def check_draft(target: PoolBinding, draft: PoolBinding) -> None:
    """Design, section 4: the pools' draft rules. Raises ``GeometryError`` with both geometries."""
    for rule, remedy, holds in _DRAFT_RULES:
        if not holds(target, draft):
            raise GeometryError(
                f"{rule}; target: {_describe(target)}; draft: {_describe(draft)}",
                stage="pools",
                remedy=remedy,
            )


def check_order(needs: Sequence[BufferSpec]) -> None:
    """A draft's state comes after all of its target's. Raises ``GeometryError``."""
    first_draft: BufferSpec | None = None
    for spec in needs:
        if spec.owner is Owner.DRAFT:
            first_draft = first_draft or spec
        elif first_draft is not None:
            raise GeometryError(
                f"draft state {first_draft.name} is declared before target state {spec.name}",
                stage="pools",
                remedy="declare the target's state first and the draft's as trailing components",
            )


def _layer_ratios(specs: Sequence[BufferSpec]) -> tuple[int, ...]:
    ratios: dict[int, int] = {}
    for spec in specs:
        if spec.coverage is Coverage.LAST:
            continue  # a hidden vector says nothing about attention
        for layer in spec.layer_ids:
            known, here = ratios.get(layer, 0), _ratio(spec)
            ratios[layer] = min(known, here) if known and here else known or here
    return tuple(ratios[layer] for layer in sorted(ratios))


def _ratio(spec: BufferSpec) -> int:
    match spec.coverage:
        case Coverage.HISTORY:
            return spec.tokens_per_row
        case Coverage.OVERLAP_TAIL | Coverage.OPEN_BLOCK:
            return spec.window_tokens
        case Coverage.WINDOW | Coverage.LAST:
            return 0


def _describe(binding: PoolBinding) -> str:
    if binding.geometry.mode is PoolMode.UNIFIED:
        return str(binding.geometry)
    # The number is only there to tell two mapping objects apart.
    name = "none" if binding.window_map is None else f"{id(binding.window_map):#x}"
    return f"{binding.geometry} window_map={name}"


def _window_only_or_whole(_: PoolBinding, draft: PoolBinding) -> bool:
    """NextN keeps a window; DSPARK keeps each token's row. Nothing between, and no mixture."""
    return set(draft.geometry.layer_ratios) in ({0}, {1}, set())


def _same_mode(target: PoolBinding, draft: PoolBinding) -> bool:
    return target.geometry.mode is draft.geometry.mode


def _same_window(target: PoolBinding, draft: PoolBinding) -> bool:
    return target.geometry.window_tokens == draft.geometry.window_tokens


def _same_ring(target: PoolBinding, draft: PoolBinding) -> bool:
    if target.geometry.mode is not PoolMode.UNIFIED:
        return True
    mine, its = target.geometry, draft.geometry
    return (mine.ring_rows, mine.ring_capacity) == (its.ring_rows, its.ring_capacity)


def _same_page(target: PoolBinding, draft: PoolBinding) -> bool:
    if target.geometry.mode is not PoolMode.PAGED:
        return True
    return target.geometry.page_tokens == draft.geometry.page_tokens


def _same_map(target: PoolBinding, draft: PoolBinding) -> bool:
    if target.geometry.mode is not PoolMode.PAGED:
        return True
    return target.window_map is not None and target.window_map is draft.window_map


# (rule, remedy, whether it holds), in this order: a message names the most basic difference.
_DRAFT_RULES: tuple[tuple[str, str, Callable[[PoolBinding, PoolBinding], bool]], ...] = (
    (
        "every draft layer must be window-only (compression ratio 0), or every one must keep each "
        "token (ratio 1, dspark)",
        "use a NextN layer whose compression ratio is 0, or a DSPARK draft",
        _window_only_or_whole,
    ),
    (
        "target and draft must both be paged or both unified",
        "build both from one pool configuration",
        _same_mode,
    ),
    (
        "target and draft must have the same window",
        "use a draft trained with the target's sliding window",
        _same_window,
    ),
    (
        "target and draft must have the same window ring rows and ring capacity",
        "size both rings from one window, one speculation width and one slot count",
        _same_ring,
    ),
    (
        "target and draft must have the same page size",
        "build both from one pool configuration",
        _same_page,
    ),
    (
        "target and draft must share one full-to-window mapping object",
        "hand the target's WindowMap to the draft; an equal copy drifts at the first eviction",
        _same_map,
    ),
)
