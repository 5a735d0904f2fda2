"""Bounds of registered memory: nothing outside, nothing that wraps."""

from __future__ import annotations

import numpy as np
import pytest

from sluice.errors import TransferFailed
from sluice.pools.base import Region
from sluice.transfer.plane import Write
from sluice.transfer.ranges import AddressRanges, write_table

_REGIONS = (
    Region("a", 0, 1000, 10, 16),  # 1000..1160
    Region("a", 1, 1160, 10, 16),  # touches the first
    Region("b", 0, 2000, 1, 64),  # 2000..2064
)


def _check(address: int, size: int) -> None:
    AddressRanges("peer", _REGIONS).check(
        np.array([address], dtype=np.uint64), np.array([size], dtype=np.uint64)
    )


@pytest.mark.parametrize(
    ("address", "size"), [(1000, 1), (1000, 320), (1150, 20), (2000, 64), (2063, 1)]
)
def test_inside(address: int, size: int) -> None:
    _check(address, size)


@pytest.mark.parametrize(
    ("address", "size"),
    [
        (999, 1),
        (999, 400),
        (1000, 321),
        (1319, 2),
        (1320, 1),
        (1999, 1),
        (2000, 65),
        (2064, 1),
        (5000, 1),
        (1000, 0),
        (1000, 2**64 - 1),  # address + size wraps to 999
        (2**64 - 1, 2),
        (0, 1),
    ],
)
def test_outside(address: int, size: int) -> None:
    with pytest.raises(TransferFailed, match="outside"):
        _check(address, size)


def test_the_offending_write_is_named() -> None:
    ranges = AddressRanges("decode-7", _REGIONS)
    with pytest.raises(TransferFailed, match=r"write 2: 64 bytes at 0x7d1.*decode-7"):
        ranges.check(
            np.array([1000, 2000, 2001], dtype=np.uint64), np.array([8, 64, 64], dtype=np.uint64)
        )


@pytest.mark.parametrize(
    "region",
    [
        Region("a", 0, 0, 1, 1),
        Region("a", 0, -16, 4, 16),
        Region("a", 0, 16, 0, 16),
        Region("a", 0, 16, 4, 0),
        Region("a", 0, 16, -1, -16),
        Region("a", 0, 2**64 - 16, 1, 16),
        Region("a", 0, 16, 2**60, 2**10),
    ],
)
def test_impossible_region(region: Region) -> None:
    with pytest.raises(TransferFailed, match="impossible region"):
        AddressRanges("peer", [region])


def test_no_regions_accept_nothing() -> None:
    with pytest.raises(TransferFailed, match="no regions"):
        AddressRanges("peer", []).check(
            np.array([1], dtype=np.uint64), np.array([1], dtype=np.uint64)
        )


@pytest.mark.parametrize(
    "write", [Write(-1, 1, 1), Write(1, 2**64, 1), Write(1, 1, -1), Write(1, 1, 2**64 + 1)]
)
def test_numbers_beyond_64_bits_are_refused(write: Write) -> None:
    with pytest.raises(TransferFailed, match="64-bit"):
        write_table([write])


def test_empty_group_is_refused() -> None:
    with pytest.raises(TransferFailed, match="empty"):
        write_table([])
