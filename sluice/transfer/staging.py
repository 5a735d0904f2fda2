"""Staging memory: rows that lie apart are gathered here, so that they leave as one long write.

A descriptor costs about as much as copying 16 KB (docs/performance.md), and a dealt row has one or two. What a
decode rank of several owns of a page is apart in prefill's page and end to end in its own, so one gather here
turns a write a row into a write a page or more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sluice.errors import InternalError
from sluice.pools.base import Region
from sluice.transfer.plane import Movement, Pack, Write

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STAGING_SLOTS = 8  # two groups in flight to each of four ranks
# Staging takes at most this part of what it copies from, where a slot fits into that.
STATE_SHARE = 8


def staging_slots(state_bytes: int, slot_bytes: int) -> int:
    """How many slots a rank with ``state_bytes`` of state gets: 1 to ``STAGING_SLOTS``."""
    return max(1, min(STAGING_SLOTS, state_bytes // (STATE_SHARE * slot_bytes)))


@dataclass(frozen=True)
class StagingUse:
    """Slots by state. ``quarantined``: a group that nobody waits for any more may still be read from them."""

    total: int
    held: int
    quarantined: int


class Staging:
    """Slots of one size in one stretch of memory on the arena's device. Only the I/O thread calls it.

    A slot belongs to one posted group, from before its gather until its handle has settled.
    """

    def __init__(self, arena: Tensor, slot_bytes: int, num_slots: int) -> None:
        self._arena = arena
        self._slot_bytes = slot_bytes
        self._num_slots = num_slots
        self._memory = arena.new_empty(num_slots * slot_bytes)
        self._stream = _own_stream(arena)
        self._free = list(range(num_slots))
        self._quarantined: set[int] = set()

    @property
    def memory(self) -> Tensor:
        """All slots, uint8, to be registered once."""
        return self._memory

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    @property
    def all_quarantined(self) -> bool:
        """Nothing comes back before a stuck peer does: waiting for a slot could take for ever."""
        return len(self._quarantined) == self._num_slots

    def use(self) -> StagingUse:
        stuck = len(self._quarantined)
        return StagingUse(self._num_slots, self._num_slots - len(self._free) - stuck, stuck)

    def take(self) -> int | None:
        """A slot, None when all are taken."""
        return self._free.pop() if self._free else None

    def quarantine(self, slot: int) -> None:
        """The group's deadline passed. Its bytes may still be read, so the slot is kept until it settles."""
        self._check_taken(slot)
        self._quarantined.add(slot)

    def give(self, slot: int) -> None:
        """The slot's group has settled. Raises ``InternalError`` for a slot that is free already."""
        self._check_taken(slot)
        self._quarantined.discard(slot)
        self._free.append(slot)

    def gather(self, slot: int, group: Sequence[Movement]) -> tuple[Write, ...]:
        """Copy the pieces of a group's packs into a slot; the group as writes alone.

        The copies are done when this returns. Raises ``InternalError`` for a group larger than a slot.
        """
        self._check_taken(slot)
        if self._stream is None:
            return self._gather(slot, group)
        import torch

        with torch.cuda.stream(self._stream):
            writes = self._gather(slot, group)
        self._stream.synchronize()
        return writes

    def _gather(self, slot: int, group: Sequence[Movement]) -> tuple[Write, ...]:
        at, end = slot * self._slot_bytes, (slot + 1) * self._slot_bytes
        writes: list[Write] = []
        for move in group:
            if isinstance(move, Write):
                writes.append(move)
                continue
            if move.num_bytes > end - at:
                raise InternalError(f"a slot of {self._slot_bytes} bytes is full", stage="transfer")
            self._copy(move, at)
            source = self._memory.data_ptr() + at
            writes.append(Write(source, move.destination, move.num_bytes))
            at += move.num_bytes
        return tuple(writes)

    def _copy(self, pack: Pack, at: int) -> None:
        """``plan_writes`` has checked the rows; torch checks again that nothing outside the arena is read."""
        import torch

        rows = torch.tensor(pack.rows, device=self._arena.device)
        shape = (max(pack.rows) + 1, pack.piece_bytes)
        offset = self._arena.storage_offset() + pack.base - self._arena.data_ptr()
        pieces = self._arena.as_strided(shape, (pack.stride, 1), offset)
        out = self._memory[at : at + pack.num_bytes].view(len(pack.rows), pack.piece_bytes)
        torch.index_select(pieces, 0, rows, out=out)

    def _check_taken(self, slot: int) -> None:
        if slot in self._free or not 0 <= slot < self._num_slots:
            raise InternalError(f"staging slot {slot} isn't taken", stage="transfer")


def _own_stream(arena: Tensor) -> torch.cuda.Stream | None:
    """On the engine's, a gather would wait for steps that are queued there."""
    if not arena.is_cuda:
        return None
    import torch

    return torch.cuda.Stream(arena.device)


def unpacked(group: Sequence[Movement]) -> tuple[Write, ...]:
    """A group as writes of single pieces, straight from the rows."""
    return tuple(
        write for move in group for write in (move.writes() if isinstance(move, Pack) else (move,))
    )


def region_of(staging: Tensor) -> Region:
    """For bounds: what of this side's memory may be written from, beside its rows."""
    return Region("staging", 0, staging.data_ptr(), staging.numel(), 1)
