"""The mxfp8 format, against torch's own casts and a search over every e4m3 value; its specs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sluice.config import PoolConfig, PoolMode
from sluice.errors import GeometryError
from sluice.layout.component import Component, Coverage, Kind, Owner, Space
from sluice.pools.base import BufferSpec
from sluice.pools.block_scale import BLOCK_VALUES, MXFP8, dequantise, quantise, stored
from sluice.pools.specs import components_of

SPEC = BufferSpec(
    "target.kv", Owner.TARGET, Kind.KV, Coverage.HISTORY, 1, 0, (0, 2), MXFP8, (3, 2, 64), 0
)
ALL_CODES = torch.arange(256, dtype=torch.uint8)
GRID = ALL_CODES.view(torch.float8_e4m3fn).float()
GRID = GRID[GRID.isfinite()]


def spread(*shape: int, seed: int = 0) -> Tensor:
    """Normal values whose magnitude differs from block to block by many powers of two."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(-40, 40, (*shape[:-1], shape[-1] // BLOCK_VALUES), generator=generator)
    noise = torch.randn(*shape, generator=generator)
    return noise * torch.exp2(powers.float()).repeat_interleave(BLOCK_VALUES, dim=-1)


def back(x: Tensor) -> Tensor:
    return dequantise(*quantise(x), torch.float32)


def smallest_scale(largest: float) -> float:
    """By trying: the least power of two under which the largest value is at most 448."""
    return next(2.0**e for e in range(-127, 128) if largest <= 448 * 2.0**e)


def test_bytes_are_those_of_torchs_casts_under_the_smallest_scale_without_clipping() -> None:
    x = spread(20, 3, 64)
    values, scales = quantise(x)
    assert (values.shape, scales.shape) == ((20, 3, 64), (20, 3, 2))
    blocks = x.unflatten(-1, (-1, BLOCK_VALUES))
    wanted = torch.tensor([smallest_scale(b.abs().max().item()) for b in blocks.flatten(0, -2)])
    wanted = wanted.view(scales.shape)
    assert torch.equal(scales.view(torch.uint8), wanted.to(torch.float8_e8m0fnu).view(torch.uint8))
    scaled = (blocks / wanted.unsqueeze(-1)).flatten(-2)
    assert torch.equal(values.view(torch.uint8), scaled.to(torch.float8_e4m3fn).view(torch.uint8))


@pytest.mark.parametrize("power", [-118, -20, 0, 1, 100])
def test_every_value_of_the_grid_comes_back_bit_for_bit(power: int) -> None:
    """Each of the format's values in a block whose largest is one of its own, small or big."""
    x = torch.zeros(len(GRID), BLOCK_VALUES)
    x[:, 0], x[:, 1:9] = GRID, GRID[torch.randint(len(GRID), (len(GRID), 8))]
    x *= 2.0**power
    assert torch.equal(back(x).view(torch.int32), x.view(torch.int32))


def test_what_was_read_and_written_again_is_the_same() -> None:
    once = back(spread(50, 96))
    assert torch.equal(back(once), once)


def test_each_value_goes_to_the_nearest_of_the_grid() -> None:
    """By search; halfway cases are left to the comparison with torch's cast."""
    x = spread(40, 32, seed=1)
    _, scales = quantise(x)
    scaled = x / scales.float()
    distance = (scaled.unsqueeze(-1) - GRID).abs().amin(-1)
    assert torch.equal((scaled - back(x) / scales.float()).abs(), distance)


def test_the_error_is_a_17th_or_a_1024th_of_the_scale() -> None:
    x = spread(500, 64, seed=2)
    _, scales = quantise(x)
    floor = scales.float().repeat_interleave(BLOCK_VALUES, dim=-1) / 1024
    error = (back(x) - x).abs()
    assert bool((error <= torch.maximum(x.abs() / 16.999, floor)).all())
    assert (error / x.abs())[x.abs() > floor * 16].max() > 0.058  # so the bound is tight


@pytest.mark.parametrize(
    ("largest", "scale"),
    [
        (448.0, 1.0),
        (448.5, 2.0),  # the specification's rule would take 1 and clip
        (500.0, 2.0),
        (224.0, 0.5),
        (3e38, 2.0**120),
        (1e-36, 2.0**-127),  # the smallest there is
        (1e-45, 2.0**-127),
    ],
)
def test_scales_at_the_edges(largest: float, scale: float) -> None:
    x = torch.full((1, 32), -largest)
    x[0, :31] = 0
    values, scales = quantise(x)
    assert scales.double().item() == scale
    bound = max(largest / 17, scale / 1024)
    assert abs(dequantise(values, scales, torch.float64)[0, 31].item() + largest) <= bound


def test_zeros_stay_zero_under_any_scale() -> None:
    assert not back(torch.zeros(2, 64)).any()
    # A cleared page: the byte 0 is the scale 2**-127, not 0.
    cleared = torch.zeros(1, 32, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scale = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert not dequantise(cleared, scale, torch.float32).any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_shows_in_its_block_and_in_no_other(bad: float) -> None:
    x = torch.ones(1, 64)
    x[0, 40] = bad
    found = back(x)
    assert torch.equal(found[0, :32], x[0, :32])
    assert bool(found[0, 32:].isnan().all())


def test_an_unwritten_row_filled_for_debugging_reads_as_nan() -> None:
    values, scales = (torch.full((1, n), 0xFF, dtype=torch.uint8) for n in (32, 1))
    read = dequantise(
        values.view(torch.float8_e4m3fn), scales.view(torch.float8_e8m0fnu), torch.float32
    )
    assert bool(read.isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_types_go_in_and_out(dtype: torch.dtype) -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    found = dequantise(*quantise(x), dtype)
    assert found.dtype is dtype
    assert torch.equal(
        found.float(), back(x.float())
    )  # e4m3 times a power of two fits each of them


def test_bits_do_not_depend_on_the_batch() -> None:
    x = spread(33, 96, seed=4)
    values, scales = quantise(x)
    alone = [quantise(row.unsqueeze(0)) for row in x]
    for whole, parts in ((values, [v for v, _ in alone]), (scales, [s for _, s in alone])):
        assert torch.equal(whole.view(torch.uint8), torch.cat(parts).view(torch.uint8))


# ---- specs


def test_values_then_scales_that_count_rows_alike() -> None:
    values, scales = stored(SPEC)
    assert values == replace(SPEC, dtype="float8_e4m3fn")
    assert scales == replace(
        SPEC,
        name="target.kv.scale",
        kind=Kind.BLOCK_SCALE,
        dtype="float8_e8m0fnu",
        row_shape=(3, 2, 2),
    )


def test_other_types_stay_one_component() -> None:
    plain = replace(SPEC, dtype="bfloat16", row_shape=(7,))
    assert stored(plain) == (plain,)


@pytest.mark.parametrize(
    ("mode", "space"), [(PoolMode.PAGED, Space.WINDOW_PAGE), (PoolMode.UNIFIED, Space.RING_ROW)]
)
def test_window_scales_live_beside_their_values(mode: PoolMode, space: Space) -> None:
    window = replace(SPEC, kind=Kind.SWA, coverage=Coverage.WINDOW, window_tokens=8)
    pool = PoolConfig(mode=mode, page_tokens=8, num_pages=4, num_window_pages=4, num_slots=2)
    values, scales = components_of(stored(window), pool, 4)
    assert scales.kind is Kind.BLOCK_SCALE_SWA

    def numbering(one: Component) -> tuple[object, ...]:
        return one.space, one.coverage, one.window_tokens, one.rows_per_item, one.num_items

    assert numbering(scales) == numbering(values)
    assert scales.space is space


@pytest.mark.parametrize(
    ("row_shape", "stretches", "width"),
    [((2, 2, 48), (), 48), ((576,), (560, 16), 560), ((96,), (48, 48), 48)],
)
def test_widths_that_are_not_whole_blocks_are_refused(
    row_shape: tuple[int, ...], stretches: tuple[int, ...], width: int
) -> None:
    with pytest.raises(
        GeometryError, match=f"target.kv.*'mxfp8'.*{width} isn't a multiple of 32"
    ) as e:
        stored(replace(SPEC, row_shape=row_shape), stretches)
    assert "bfloat16" in e.value.remedy


def test_bytes_a_row_are_those_of_values_and_a_thirtysecond_of_scales() -> None:
    values, scales = components_of(stored(SPEC), PoolConfig(page_tokens=8), 1)
    assert (values.bytes_per_row, scales.bytes_per_row) == (2 * 3 * 2 * 64, 2 * 3 * 2 * 2)
