"""Dequantisation against arithmetic written out by hand, value by value."""

from __future__ import annotations

import torch

from sluice.models.quantised import dequantise, dequantised_shape, scale_shape, unpack_fp4


def test_fp4_low_nibble_is_the_even_column() -> None:
    packed = torch.tensor([[0x21, 0x0F, 0xA7]], dtype=torch.uint8)
    assert unpack_fp4(packed).tolist() == [[0.5, 1.0, -6.0, 0.0, 6.0, -1.0]]
    assert unpack_fp4(packed.view(torch.int8)).tolist() == [[0.5, 1.0, -6.0, 0.0, 6.0, -1.0]]


def test_every_fp4_code() -> None:
    packed = torch.arange(16, dtype=torch.uint8).unsqueeze(0)
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    assert unpack_fp4(packed)[0, 0::2].tolist() == [*magnitudes, *(-m for m in magnitudes)]


def test_fp4_blocks_of_32() -> None:
    packed = torch.full((2, 32), 0x22, dtype=torch.uint8)  # every value is 1.0
    scale = torch.tensor([[127, 128], [126, 130]], dtype=torch.uint8)
    values = dequantise(packed, scale.view(torch.float8_e8m0fnu), torch.float32)
    assert values.shape == (2, 64)
    assert values[:, [0, 31, 32, 63]].tolist() == [[1, 1, 2, 2], [0.5, 0.5, 8, 8]]


def test_fp8_blocks_of_128_with_ragged_edges() -> None:
    generator = torch.Generator().manual_seed(0)
    stored = torch.randn((130, 200), generator=generator).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[120, 127], [128, 133]], dtype=torch.uint8)
    values = dequantise(stored, exponents.view(torch.float8_e8m0fnu), torch.float32)
    for row in (0, 127, 128, 129):
        for col in (0, 127, 128, 199):
            factor = 2.0 ** (int(exponents[row // 128, col // 128]) - 127)
            assert values[row, col].item() == stored[row, col].float().item() * factor
    half = dequantise(stored, exponents.view(torch.float8_e8m0fnu), torch.bfloat16)
    assert torch.equal(half.float(), values)  # bfloat16 holds the product exactly


def test_shapes() -> None:
    assert dequantised_shape((6, 10), torch.int8) == (6, 20)
    assert dequantised_shape((6, 10), torch.float8_e4m3fn) == (6, 10)
    assert scale_shape((6, 64), torch.uint8) == (6, 2)
    assert scale_shape((129, 256), torch.float8_e4m3fn) == (2, 2)
    assert scale_shape((3, 129, 256), torch.float8_e4m3fn) == (3, 2, 2)
