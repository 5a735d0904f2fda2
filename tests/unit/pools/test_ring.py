"""Unified mode: a layer's ring and its compressed pages are one buffer, and views alias its bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from sluice.config import PoolMode
from sluice.errors import GeometryError
from sluice.pools.base import Region
from sluice.pools.memory import Memory, build_memory
from tests.unit.pools.dsv4_needs import (
    LATENT,
    VERIFY_TOKENS,
    config,
    draft_needs,
    memory,
    needs,
    target_needs,
)

ROW_BYTES = 4 * LATENT
RING_ROWS = 19 * 5  # (W + T - 1) rows for each of 4 slots and the padding slot


def region(state: Memory, component: str, layer_id: int) -> Region:
    (found,) = [r for r in state.regions() if (r.component, r.layer_id) == (component, layer_id)]
    return found


@pytest.mark.parametrize(
    ("component", "layer_id", "rows"), [("target.c4", 2, 25 * 32), ("target.c128", 3, 25)]
)
def test_compressed_pages_lie_right_behind_the_ring(
    component: str, layer_id: int, rows: int
) -> None:
    state = memory(PoolMode.UNIFIED)
    ring = region(state, "target.swa_ring", layer_id)
    pages = region(state, component, layer_id)
    assert (ring.num_rows, ring.row_bytes) == (RING_ROWS, ROW_BYTES)
    assert (pages.num_rows, pages.row_bytes) == (rows, ROW_BYTES)
    assert pages.address == ring.address + RING_ROWS * ROW_BYTES


def test_a_window_only_layer_and_the_draft_have_a_ring_and_nothing_behind_it() -> None:
    state = memory(PoolMode.UNIFIED)
    rings = [region(state, "target.swa_ring", layer) for layer in (0, 1)]
    rings.append(region(state, "draft.swa_ring", 5))
    for ring in rings:
        end = ring.address + ring.num_rows * ring.row_bytes
        assert all(not ring.address < other.address < end for other in state.regions())
    paged_ends = {r.address + r.num_rows * r.row_bytes for r in rings}
    compressed = {r.address for r in state.regions() if r.component in ("target.c4", "target.c128")}
    assert not paged_ends & compressed


def test_views_write_the_bytes_their_region_names() -> None:
    state = memory(PoolMode.UNIFIED)
    base = state.arena().data_ptr()
    for number, one in enumerate(state.regions(), start=1):
        buffer = state.buffer(one.component, one.layer_id)
        assert buffer.shape[0] == one.num_rows
        buffer.view(one.num_rows, -1)[one.num_rows - 1] = float(number)
        at = one.address - base + (one.num_rows - 1) * one.row_bytes
        raw = state.arena()[at : at + one.row_bytes].view(buffer.dtype)
        assert raw.tolist() == [float(number)] * raw.numel(), one


@pytest.mark.parametrize("mode", PoolMode)
def test_no_two_regions_overlap_and_all_lie_in_the_arena(mode: PoolMode) -> None:
    state = memory(mode)
    spans = sorted((r.address, r.address + r.num_rows * r.row_bytes) for r in state.regions())
    for (_, stop), (start, _) in pairwise(spans):
        assert stop <= start
    base = state.arena().data_ptr()
    assert base <= spans[0][0]
    assert spans[-1][1] <= base + state.arena().numel()


def test_paged_mode_keeps_windows_and_pages_apart() -> None:
    state = memory(PoolMode.PAGED)
    for component, layer_id in (("target.c4", 2), ("target.c128", 3)):
        assert region(state, component, layer_id).address % 256 == 0
        assert region(state, "target.swa", layer_id).address % 256 == 0


def test_indexer_keys_never_share_even_when_as_wide_as_latents() -> None:
    wide = [
        replace(spec, row_shape=(LATENT,)) if spec.name == "target.c4_indexer" else spec
        for spec in needs()
    ]
    # Declared first, so that picking "the first history of the layer" would pick it.
    wide[0], wide[1] = wide[1], wide[0]
    state = build_memory(wide, config(PoolMode.UNIFIED), VERIFY_TOKENS)
    ring = region(state, "target.swa_ring", 2)
    behind = ring.address + ring.num_rows * ring.row_bytes
    assert region(state, "target.c4", 2).address == behind
    assert region(state, "target.c4_indexer", 2).address != behind


@pytest.mark.parametrize("change", [{"dtype": "float64"}, {"row_shape": (LATENT + 1,)}])
def test_one_buffer_has_one_row_format(change: dict[str, object]) -> None:
    other = [
        replace(spec, **change) if spec.name == "target.c4" else spec  # type: ignore[arg-type]
        for spec in needs()
    ]
    with pytest.raises(GeometryError, match=r"layer 2: rows of target\.swa_ring are .* target\.c4"):
        build_memory(other, config(PoolMode.UNIFIED), VERIFY_TOKENS)
    build_memory(other, config(PoolMode.PAGED), VERIFY_TOKENS)


def test_a_draft_layer_never_shares_with_a_target_layer_of_the_same_number() -> None:
    # Drafts may count their layers from 0; here the draft's is 2, where the target has c4 pages.
    specs = (*target_needs(), *(replace(spec, layer_ids=(2,)) for spec in draft_needs()))
    state = build_memory(specs, config(PoolMode.UNIFIED), VERIFY_TOKENS)
    draft = region(state, "draft.swa_ring", 2)
    behind = draft.address + draft.num_rows * draft.row_bytes
    assert region(state, "target.c4", 2).address != behind
    assert not torch.isnan(state.buffer("draft.swa_ring", 2)).any()
