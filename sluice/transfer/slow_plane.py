"""A link of a chosen rate, for tests: a plane whose writes are acknowledged late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from sluice.pools.base import Region
from sluice.transfer.plane import Endpoint, Handle, HandleState, Link, Plane, Polled, Write
from sluice.transfer.writes import count_bytes

if TYPE_CHECKING:
    from torch import Tensor


class SlowPlane:
    """``plane`` at ``rate`` bytes a second, asked for before each group; None = as fast as it goes.

    The bytes move at once and the news of it is held back, one group after the other, which is all that the
    sending side can see of a slow link.
    """

    def __init__(self, plane: Plane, rate: Callable[[], float | None]) -> None:
        self._plane = plane
        self._rate = rate
        self._due: dict[int, float] = {}  # of a handle, by its id
        self._busy_until = 0.0

    @property
    def initiator(self) -> bool:
        return self._plane.initiator

    def open(
        self, arena: Tensor, regions: Sequence[Region], staging: Tensor | None = None
    ) -> Endpoint:
        return self._plane.open(arena, regions, staging)

    def connect(self, peer: Endpoint) -> Link:
        return self._plane.connect(peer)

    def post(self, link: Link, writes: Sequence[Write]) -> Handle:
        rate, began = self._rate(), time.monotonic()
        handle = self._plane.post(link, writes)
        if rate is not None:
            self._busy_until = max(began, self._busy_until) + count_bytes(writes) / rate
            self._due[id(handle)] = self._busy_until
        return handle

    def poll(self, handle: Handle) -> Polled:
        if time.monotonic() < self._due.get(id(handle), 0.0):
            return Polled(HandleState.POSTED)
        return self._plane.poll(handle)

    def release(self, handle: Handle) -> None:
        self._plane.release(handle)
        self._due.pop(id(handle), None)

    def transports(self) -> tuple[str, ...]:
        return self._plane.transports()

    def disconnect(self, link: Link) -> None:
        self._due.clear()  # what fails now fails at once
        self._plane.disconnect(link)

    def close(self) -> None:
        self._plane.close()
