"""The data plane's contract: register an arena, reach a peer's regions, write rows, settle. Twins: nixl, loopback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from sluice.pools.base import Region

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Endpoint:
    """How a pod's memory is reached. ``metadata`` is opaque to everybody but the plane, and travels over gRPC only."""

    plane: str
    agent_name: str
    metadata: bytes
    memory: str  # "DRAM" or "VRAM"
    device: int
    regions: tuple[Region, ...]


@dataclass(frozen=True)
class Write:
    """Copy ``num_bytes`` from a local address to an address of the peer."""

    source: int
    destination: int
    num_bytes: int


@dataclass(frozen=True)
class Pack:
    """Pieces that lie apart here and end to end at the peer: number i is ``piece_bytes`` from
    ``base + rows[i] * stride``. Planes write none: ``transfer.staging`` gathers one into a ``Write``.
    """

    base: int
    stride: int
    rows: tuple[int, ...]
    piece_bytes: int
    destination: int

    @property
    def num_bytes(self) -> int:
        return len(self.rows) * self.piece_bytes

    def part(self, start: int, stop: int) -> Pack:
        """Pieces ``start .. stop``."""
        at = self.destination + start * self.piece_bytes
        return replace(self, rows=self.rows[start:stop], destination=at)

    def writes(self) -> tuple[Write, ...]:
        """The same bytes without gathering them: a write a piece."""
        return tuple(
            Write(
                self.base + row * self.stride,
                self.destination + index * self.piece_bytes,
                self.piece_bytes,
            )
            for index, row in enumerate(self.rows)
        )


Movement = Write | Pack


class HandleState(Enum):
    POSTED = "posted"
    DONE = "done"  # every byte is visible at the peer
    FAILED = "failed"  # settled: the peer is gone or refused, this side sends nothing more


@dataclass(frozen=True)
class Polled:
    """``peer_lost`` tells a vanished peer (retry elsewhere) from a refused write (a bug or stale metadata)."""

    state: HandleState
    error: str = ""
    peer_lost: bool = False


class Handle(Protocol):
    """One posted group of writes. Releasing it does not cancel it."""


class Link(Protocol):
    """One connected peer of one epoch."""

    @property
    def endpoint(self) -> Endpoint: ...

    @property
    def lost(self) -> bool:
        """True once the plane saw the peer go; such a link never heals, a new epoch is a new link."""
        ...


class Plane(Protocol):
    """Every method is called from the one I/O thread (``transfer.worker``); none may be called from anywhere else.

    ``post`` may block for the copy itself (same-host CMA) but never for the peer's answer; ``poll`` never blocks.
    Errors raised by ``connect``/``post`` are ``PeerLost`` (peer gone) or ``TransferFailed`` (anything else).
    """

    @property
    def initiator(self) -> bool:
        """Whether this side posts writes; the other one only receives."""
        ...

    def open(
        self, arena: Tensor, regions: Sequence[Region], staging: Tensor | None = None
    ) -> Endpoint:
        """Register the arena, once. It must outlive every peer that ever held the endpoint.

        ``staging``, on the same device, is registered as well: writes may come from it, and nobody is told of it.
        """
        ...

    def connect(self, peer: Endpoint) -> Link: ...

    def post(self, link: Link, writes: Sequence[Write]) -> Handle:
        """Start one group. Raising means that not one byte was sent; later failures show in ``poll``.

        Every address is checked against the regions of both sides first: the peer's numbers are not trusted.
        """
        ...

    def poll(self, handle: Handle) -> Polled: ...

    def release(self, handle: Handle) -> None:
        """Forget a settled handle. Raises ``InternalError`` for one that is still posted: it would keep writing."""
        ...

    def transports(self) -> tuple[str, ...]:
        """What writes to the connected peers go over, as the network library chose; empty = it can't tell."""
        ...

    def disconnect(self, link: Link) -> None:
        """Forget the peer. Handles still posted on the link fail; on a living peer their bytes may still land."""
        ...

    def close(self) -> None:
        """Drop everything. Idempotent; the caller settled or gave up its handles before."""
        ...
