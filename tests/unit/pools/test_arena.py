"""Carve-outs are aligned, disjoint views of one tensor."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from sluice.errors import ConfigError
from sluice.pools.arena import ALIGN_BYTES, Arena, ArenaPlan, bytes_per_row, dtype_of


def test_carve_outs_are_aligned_and_disjoint() -> None:
    plan = ArenaPlan()
    carves = [plan.reserve(size) for size in (1, 255, 256, 257, 10)]
    assert all(carve.offset % ALIGN_BYTES == 0 for carve in carves)
    for one, following in pairwise(carves):
        assert one.offset + one.num_bytes <= following.offset
    assert plan.num_bytes == carves[-1].offset + 10


def test_addresses_are_aligned_not_only_offsets() -> None:
    plan = ArenaPlan()
    plan.reserve(8)
    second = plan.reserve(8)
    arena = Arena(plan, "cpu")
    assert arena.bytes.data_ptr() % ALIGN_BYTES == 0
    assert arena.rows(second, 0, 2, 4).data_ptr() == arena.bytes.data_ptr() + second.offset


def test_views_alias_the_arena_and_start_zeroed() -> None:
    plan = ArenaPlan()
    carve = plan.reserve(24)
    arena = Arena(plan, "cpu")
    rows = arena.rows(carve, 8, 2, 8)
    assert not arena.bytes.any()
    rows[1] = 7
    assert arena.bytes[carve.offset + 16 : carve.offset + 24].tolist() == [7] * 8
    assert int(arena.bytes.sum()) == 56


def test_a_view_cannot_leave_its_carve_out() -> None:
    plan = ArenaPlan()
    carve = plan.reserve(16)
    plan.reserve(100)
    with pytest.raises(AssertionError):
        Arena(plan, "cpu").rows(carve, 8, 2, 8)


def test_row_bytes_follow_the_dtype() -> None:
    assert bytes_per_row("float32", (2, 3)) == 24
    assert bytes_per_row("bfloat16", (5,)) == 10
    assert bytes_per_row("uint8", (7,)) == 7
    assert dtype_of("float8_e4m3fn") is torch.float8_e4m3fn


@pytest.mark.parametrize("name", ["float31", "Tensor", ""])
def test_unknown_dtypes_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"dtype '{name}' is unknown"):
        dtype_of(name)
