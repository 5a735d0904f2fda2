"""Bounds of registered memory: a peer's numbers are checked here before any plane acts on them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from sluice.errors import TransferFailed
from sluice.pools.base import Region
from sluice.transfer.plane import Write

WriteTable = NDArray[np.uint64]  # [N, 3]: source, destination, num_bytes

_ADDRESS_END = 2**64


def write_table(writes: Sequence[Write]) -> WriteTable:
    """The writes as one C-contiguous array. Numbers that don't fit into 64 bits are refused, not wrapped."""
    if not writes:
        raise TransferFailed("an empty group of writes", stage="transfer")
    rows = [(write.source, write.destination, write.num_bytes) for write in writes]
    try:
        return np.array(rows, dtype=np.uint64)
    except (OverflowError, ValueError, TypeError) as error:
        raise TransferFailed(
            f"an address or length is not an unsigned 64-bit number: {error}", stage="transfer"
        ) from error


class AddressRanges:
    """Where one side's regions lie. Regions that touch are joined, so a run may cross from one into the next."""

    def __init__(self, owner: str, regions: Sequence[Region]) -> None:
        self._owner = owner
        spans = sorted(_span(owner, region) for region in regions)
        joined: list[list[int]] = []
        for start, stop in spans:
            if joined and start <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], stop)
            else:
                joined.append([start, stop])
        self._starts = np.array([start for start, _ in joined], dtype=np.uint64)
        self._stops = np.array([stop for _, stop in joined], dtype=np.uint64)

    def check(self, addresses: NDArray[np.uint64], sizes: NDArray[np.uint64]) -> None:
        """Raise ``TransferFailed`` unless every ``[address, address + size)`` lies inside one range.

        The sum is never formed, because it could wrap: the size is compared with what is left of the range.
        """
        if not self._starts.size:
            raise TransferFailed(f"{self._owner} declares no regions", stage="transfer")
        at = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        stops = self._stops[np.maximum(at, 0)]
        inside = (at >= 0) & (addresses < stops) & (sizes > 0)
        inside &= sizes <= np.where(inside, stops - addresses, 0).astype(np.uint64)
        if not inside.all():
            bad = int(np.argmin(inside))
            raise TransferFailed(
                f"write {bad}: {int(sizes[bad])} bytes at {int(addresses[bad]):#x} are outside the "
                f"{len(self._starts)} region(s) of {self._owner}",
                stage="transfer",
                remedy="rows must come from layout.span over this endpoint's own regions",
            )


def _span(owner: str, region: Region) -> tuple[int, int]:
    size = region.num_rows * region.row_bytes
    if (
        region.address <= 0
        or region.num_rows <= 0
        or region.row_bytes <= 0
        or region.address + size >= _ADDRESS_END
    ):
        raise TransferFailed(
            f"{owner} declares an impossible region: {region.component} layer {region.layer_id}, "
            f"{region.num_rows} rows of {region.row_bytes} bytes at {region.address:#x}",
            stage="transfer",
        )
    return region.address, region.address + size
