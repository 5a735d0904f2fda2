"""The data plane's contract: register an arena, reach a peer's regions, write rows, settle. Twins: nixl, loopback."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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


class HandleState(Enum):
    POSTED = "posted"
    DONE = "done"  # every byte is visible at the peer
    FAILED = "failed"  # settled: the peer is gone or refused, nothing more will be written


@dataclass(frozen=True)
class Polled:
    state: HandleState
    error: str = ""


class Handle(Protocol):
    """One posted group of writes. Releasing it does not cancel it."""


class Link(Protocol):
    """One connected peer of one epoch."""

    @property
    def endpoint(self) -> Endpoint: ...


class Plane(Protocol):
    """Every method is called from the one I/O thread (``transfer.worker``); none may be called from anywhere else.

    ``post`` may block for the copy itself (same-host CMA) but never for the peer's answer; ``poll`` never blocks.
    Errors raised by ``connect``/``post`` are ``PeerLost`` (peer gone) or ``TransferFailed`` (anything else).
    """

    def open(self, arena: Tensor, regions: Sequence[Region]) -> Endpoint: ...

    def connect(self, peer: Endpoint) -> Link: ...

    def post(self, link: Link, writes: Sequence[Write]) -> Handle: ...

    def poll(self, handle: Handle) -> Polled: ...

    def release(self, handle: Handle) -> None: ...

    def disconnect(self, link: Link) -> None: ...

    def close(self) -> None: ...
