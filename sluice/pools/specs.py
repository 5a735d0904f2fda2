"""From what a model needs to components: the pool mode decides each state's space."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.config import PoolConfig, PoolMode
from sluice.errors import ConfigError, GeometryError
from sluice.layout.component import Component, Coverage, Entry, Kind, Space
from sluice.pools.arena import bytes_per_row
from sluice.pools.base import BufferSpec
from sluice.pools.geometry import open_block_ring_rows, overlap_ring_rows, window_ring_rows

RING_SUFFIX = "_ring"


@dataclass(frozen=True)
class _Place:
    space: Space
    rows_per_item: int


def components_of(
    needs: Sequence[BufferSpec], config: PoolConfig, verify_tokens: int
) -> tuple[Component, ...]:
    """One component a spec, in order.

    Raises ``GeometryError`` for sizes that don't divide, ``ConfigError`` for counts below one.
    """
    _check_config(config, verify_tokens)
    names = [spec.name for spec in needs]
    windows = [spec.name for spec in needs if spec.window_tokens]
    if config.context > 1 and (windows or not any(spec.dealt for spec in needs)):
        raise ConfigError(
            f"context parallelism of {config.context} ranks needs a model whose history is latents only; "
            f"windows: {windows or 'none'}",
            stage="pools",
            remedy="set the pod's DCP to 1",
        )
    if len(set(names)) != len(names):
        raise GeometryError(f"state names must be unique, got {names}")
    return tuple(_component(spec, config, verify_tokens) for spec in needs)


def component_name(spec: BufferSpec, mode: PoolMode) -> str:
    """A window's name says how it is kept, so that two modes never look alike to the gate."""
    ringed = mode is PoolMode.UNIFIED and spec.coverage is Coverage.WINDOW
    return spec.name + RING_SUFFIX if ringed else spec.name


def num_items(space: Space, config: PoolConfig) -> int:
    """Items of a space, with the padding item 0."""
    match space:
        case Space.PAGE:
            return config.num_pages + 1
        case Space.WINDOW_PAGE:
            return config.num_window_pages + 1
        case Space.RING_ROW | Space.STATE_ROW | Space.REQUEST_SLOT:
            return config.num_slots + 1


def _component(spec: BufferSpec, config: PoolConfig, verify_tokens: int) -> Component:
    place = _place(spec, config, verify_tokens)
    kind = Kind.SWA_RING if (spec.kind, place.space) == (Kind.SWA, Space.RING_ROW) else spec.kind
    row_bytes = bytes_per_row(spec.dtype, spec.row_shape)
    entries = tuple(
        Entry(n, spec.dtype, spec.row_shape, row_bytes, spec.shard_axis, spec.shards)
        for n in spec.layer_ids
    )
    if not entries or row_bytes == 0:
        raise GeometryError(
            f"{spec.name} has layers {spec.layer_ids} and rows of {row_bytes} bytes"
        )
    return Component(
        name=component_name(spec, config.mode),
        owner=spec.owner,
        kind=kind,
        space=place.space,
        coverage=spec.coverage,
        tokens_per_row=spec.tokens_per_row,
        rows_per_item=place.rows_per_item,
        window_tokens=spec.window_tokens,
        num_items=num_items(place.space, config),
        entries=entries,
        interleave=config.context if spec.dealt else 1,
    )


def _place(spec: BufferSpec, config: PoolConfig, verify_tokens: int) -> _Place:
    page, paged = config.allocator_page_tokens, config.mode is PoolMode.PAGED
    if spec.coverage is not Coverage.HISTORY and spec.tokens_per_row != 1:
        raise GeometryError(f"{spec.name}: {spec.coverage.value} state has one token a row")
    match spec.coverage:
        case Coverage.HISTORY:
            return _Place(Space.PAGE, _divide_page(spec.name, page, spec.tokens_per_row))
        case Coverage.WINDOW if paged:
            return _Place(Space.WINDOW_PAGE, page)
        case Coverage.WINDOW:
            return _Place(Space.RING_ROW, window_ring_rows(spec.window_tokens, verify_tokens))
        case Coverage.OVERLAP_TAIL:
            rows = overlap_ring_rows(spec.window_tokens, verify_tokens)
            # A tail row is found by position % rows within its page, so pages must hold whole
            # rings. Unified mode doesn't need that, but one rule keeps both modes comparable.
            _divide_page(spec.name, page, rows)
            return _Place(Space.WINDOW_PAGE if paged else Space.STATE_ROW, rows)
        case Coverage.OPEN_BLOCK:
            rows = open_block_ring_rows(spec.window_tokens, verify_tokens)
            return _Place(Space.STATE_ROW, rows)
        case Coverage.LAST:
            return _Place(Space.REQUEST_SLOT, 1)


def _divide_page(name: str, page_tokens: int, part: int) -> int:
    if part < 1 or page_tokens % part:
        raise GeometryError(
            f"{name}: a page of {page_tokens} tokens isn't a multiple of {part}",
            remedy=f"choose page_tokens as a multiple of {part}",
        )
    return page_tokens // part


def _check_config(config: PoolConfig, verify_tokens: int) -> None:
    counts = {
        "page_tokens": config.page_tokens,
        "num_pages": config.num_pages,
        "num_slots": config.num_slots,
        "verify_tokens": verify_tokens,
    }
    if config.mode is PoolMode.PAGED:
        counts["num_window_pages"] = config.num_window_pages
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}, must be at least 1")
