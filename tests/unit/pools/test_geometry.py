"""Ring capacities, and every draft rule failing with both geometries in the message."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.config import PoolMode
from sluice.errors import GeometryError
from sluice.layout.component import Coverage, Kind, Owner
from sluice.pools.base import BufferSpec, WindowMap
from sluice.pools.geometry import (
    PoolBinding,
    PoolGeometry,
    check_draft,
    check_order,
    geometry_of,
    open_block_ring_rows,
    overlap_ring_rows,
    window_ring_rows,
)
from tests.unit.pools.dsv4_needs import VERIFY_TOKENS, config, draft_needs, needs, target_needs


def test_ring_rows_without_speculation() -> None:
    assert window_ring_rows(128, 1) == 128
    assert overlap_ring_rows(4, 1) == 8
    assert open_block_ring_rows(128, 1) == 128


def test_ring_rows_follow_the_speculation_width() -> None:
    assert window_ring_rows(128, 4) == 131
    assert [overlap_ring_rows(4, t) for t in (2, 4, 9, 10)] == [16, 16, 16, 32]
    assert open_block_ring_rows(128, 4) == 131


def test_target_geometry_paged() -> None:
    geometry = geometry_of(target_needs(), config(PoolMode.PAGED), VERIFY_TOKENS)
    assert geometry == PoolGeometry(PoolMode.PAGED, 128, 16, 0, 0, (0, 0, 4, 128, 4))


def test_target_geometry_unified_counts_the_padding_slot() -> None:
    geometry = geometry_of(target_needs(), config(PoolMode.UNIFIED, num_slots=4), VERIFY_TOKENS)
    assert geometry == PoolGeometry(PoolMode.UNIFIED, 128, 16, 19, 95, (0, 0, 4, 128, 4))


def test_plain_kv_counts_as_a_full_layer_not_as_window_only() -> None:
    spec = BufferSpec("x", Owner.TARGET, Kind.KV, Coverage.HISTORY, 1, 0, (0,), "float32", (2,))
    assert geometry_of([spec], config(PoolMode.PAGED), 1).layer_ratios == (1,)


def test_two_windows_in_one_model_are_refused() -> None:
    other = replace(target_needs()[3], name="target.other", window_tokens=32)
    with pytest.raises(GeometryError, match=r"windows of \[16, 32\] tokens"):
        geometry_of([*target_needs(), other], config(PoolMode.PAGED), 1)


PAGED = PoolGeometry(PoolMode.PAGED, 128, 16, 0, 0, (0, 4, 128))
UNIFIED = PoolGeometry(PoolMode.UNIFIED, 128, 16, 19, 95, (0, 4, 128))


def draft_of(geometry: PoolGeometry) -> PoolGeometry:
    return replace(geometry, layer_ratios=(0,))


def refusal(target: PoolBinding, draft: PoolBinding) -> str:
    with pytest.raises(GeometryError) as caught:
        check_draft(target, draft)
    message = str(caught.value)
    assert str(target.geometry) in message, "the target's geometry must be shown"
    assert str(draft.geometry) in message, "the draft's geometry must be shown"
    assert caught.value.remedy
    return message


def test_matching_drafts_pass_in_both_modes() -> None:
    shared = WindowMap(4)
    check_draft(PoolBinding(PAGED, shared), PoolBinding(draft_of(PAGED), shared))
    check_draft(PoolBinding(UNIFIED), PoolBinding(draft_of(UNIFIED)))


@pytest.mark.parametrize("geometry", [PAGED, UNIFIED])
@pytest.mark.parametrize("ratios", [(0, 4), (4,), (0, 1)])
def test_draft_layers_must_be_window_only_or_keep_each_token(
    geometry: PoolGeometry, ratios: tuple[int, ...]
) -> None:
    shared = WindowMap(4)
    draft = replace(geometry, layer_ratios=ratios)
    message = refusal(PoolBinding(geometry, shared), PoolBinding(draft, shared))
    assert "every draft layer must be window-only" in message
    assert f"ratios={list(ratios)}" in message


@pytest.mark.parametrize("geometry", [PAGED, UNIFIED])
def test_a_draft_that_keeps_each_token_fits_a_target_without_a_window(
    geometry: PoolGeometry,
) -> None:
    shared = WindowMap(4)
    plain = replace(geometry, layer_ratios=(1, 1), window_tokens=0, ring_rows=0, ring_capacity=0)
    check_draft(PoolBinding(plain, shared), PoolBinding(replace(plain, layer_ratios=(1,)), shared))
    message = refusal(PoolBinding(geometry, shared), PoolBinding(plain, shared))
    assert "must have the same window" in message


def test_target_and_draft_must_use_one_mode() -> None:
    draft = PoolBinding(draft_of(UNIFIED))
    message = refusal(PoolBinding(PAGED, WindowMap(4)), draft)
    assert "must both be paged or both unified" in message
    assert "mode=paged" in message
    assert "mode=unified" in message


@pytest.mark.parametrize("geometry", [PAGED, UNIFIED])
def test_target_and_draft_must_share_the_window(geometry: PoolGeometry) -> None:
    shared = WindowMap(4)
    draft = replace(draft_of(geometry), window_tokens=32)
    message = refusal(PoolBinding(geometry, shared), PoolBinding(draft, shared))
    assert "same window;" in message
    assert "window=16" in message
    assert "window=32" in message


@pytest.mark.parametrize("change", [{"ring_rows": 16}, {"ring_capacity": 76}])
def test_unified_rings_must_be_equal(change: dict[str, int]) -> None:
    draft = replace(draft_of(UNIFIED), **change)
    message = refusal(PoolBinding(UNIFIED), PoolBinding(draft))
    assert "same window ring rows and ring capacity" in message


def test_paged_page_sizes_must_be_equal() -> None:
    shared = WindowMap(4)
    draft = replace(draft_of(PAGED), page_tokens=256)
    message = refusal(PoolBinding(PAGED, shared), PoolBinding(draft, shared))
    assert "same page size" in message
    assert "page=256" in message


def test_an_equal_copy_of_the_map_is_not_the_same_map() -> None:
    mine, copy = WindowMap(4), WindowMap(4)
    message = refusal(PoolBinding(PAGED, mine), PoolBinding(draft_of(PAGED), copy))
    assert "share one full-to-window mapping object" in message
    assert f"{id(mine):#x}" in message
    assert f"{id(copy):#x}" in message


def test_a_missing_map_is_not_a_shared_map() -> None:
    message = refusal(PoolBinding(PAGED, None), PoolBinding(draft_of(PAGED), None))
    assert "window_map=none" in message


def test_draft_state_must_come_last() -> None:
    check_order(needs())
    with pytest.raises(GeometryError, match=r"draft\.swa is declared before target state"):
        check_order([*draft_needs()[:1], *target_needs()])
    with pytest.raises(GeometryError, match=r"before target state target\.c4_tail"):
        check_order([*target_needs()[:4], *draft_needs(), *target_needs()[4:]])
