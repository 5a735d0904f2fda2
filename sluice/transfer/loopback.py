"""The in-process twin of the NIXL plane: copies between arenas of one process, with the same refusals."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sluice.errors import InternalError, PeerLost, TransferFailed
from sluice.pools.base import Region
from sluice.transfer.plane import Endpoint, Handle, HandleState, Link, Polled, Write
from sluice.transfer.ranges import AddressRanges, WriteTable, write_table
from sluice.transfer.staging import region_of

if TYPE_CHECKING:
    from torch import Tensor

PLANE_NAME = "loopback"


class LoopbackFabric:
    """The network between the planes of one test or process: who is reachable, and who is held up.

    Held peers receive nothing: groups written to them stay posted until ``resume``. Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arenas: dict[str, Tensor] = {}
        self._held: set[str] = set()
        self._all_held = False

    def hold(self, agent_name: str | None = None) -> None:
        """Stop delivery to one peer, or to all of them (a stopped process, a hanging network)."""
        with self._lock:
            if agent_name is None:
                self._all_held = True
            else:
                self._held.add(agent_name)

    def resume(self, agent_name: str | None = None) -> None:
        """Undo ``hold``; without a name, every one of them."""
        with self._lock:
            if agent_name is None:
                self._all_held = False
                self._held.clear()
            else:
                self._held.discard(agent_name)

    def kill(self, agent_name: str) -> None:
        """Make a peer unreachable at once, as its process' death would."""
        with self._lock:
            self._arenas.pop(agent_name, None)

    def attach(self, agent_name: str, arena: Tensor) -> None:
        with self._lock:
            if agent_name in self._arenas:
                raise TransferFailed(f"agent name {agent_name} is taken", stage="transfer")
            self._arenas[agent_name] = arena

    def reachable(self, agent_name: str) -> bool:
        with self._lock:
            return agent_name in self._arenas

    def deliver(self, sources: Sequence[Tensor], agent_name: str, table: WriteTable) -> HandleState:
        """Copy a group into a peer's arena: DONE, POSTED while held, FAILED when the peer is gone."""
        with self._lock:
            arena = self._arenas.get(agent_name)
            if arena is None:
                return HandleState.FAILED
            if self._all_held or agent_name in self._held:
                return HandleState.POSTED
            _copy(sources, arena, table)
            return HandleState.DONE


def _copy(sources: Sequence[Tensor], target: Tensor, table: WriteTable) -> None:
    target_base = target.data_ptr()
    for from_address, to_address, size in table.tolist():
        source = next(one for one in sources if 0 <= from_address - one.data_ptr() < one.numel())
        start, stop = from_address - source.data_ptr(), to_address - target_base
        target[stop : stop + size].copy_(source[start : start + size])


@dataclass
class LoopbackLink:
    endpoint: Endpoint
    ranges: AddressRanges
    lost: bool = False


@dataclass
class LoopbackHandle:
    link: LoopbackLink
    table: WriteTable
    state: HandleState = HandleState.POSTED
    error: str = ""
    released: bool = False


class LoopbackPlane:
    """``transfer.plane.Plane`` inside one process. Works for CPU and CUDA arenas."""

    def __init__(self, fabric: LoopbackFabric, agent_name: str) -> None:
        self._fabric = fabric
        self._agent_name = agent_name
        self._sources: tuple[Tensor, ...] = ()
        self._ranges: AddressRanges | None = None
        self._links: dict[str, LoopbackLink] = {}
        self._closed = False

    @property
    def initiator(self) -> bool:
        return True

    def open(
        self, arena: Tensor, regions: Sequence[Region], staging: Tensor | None = None
    ) -> Endpoint:
        if self._sources:
            raise InternalError("the plane is open already", stage="transfer")
        own = [*regions, *([] if staging is None else [region_of(staging)])]
        self._ranges = AddressRanges(self._agent_name, own)
        _check_in_arena(arena, regions)
        self._fabric.attach(self._agent_name, arena)
        self._sources = (arena,) if staging is None else (arena, staging)
        on_device = arena.is_cuda
        return Endpoint(
            plane=PLANE_NAME,
            agent_name=self._agent_name,
            metadata=self._agent_name.encode(),
            memory="VRAM" if on_device else "DRAM",
            device=arena.get_device() if on_device else 0,
            regions=tuple(regions),
        )

    def connect(self, peer: Endpoint) -> LoopbackLink:
        self._require_open()
        if peer.plane != PLANE_NAME:
            raise TransferFailed(
                f"peer {peer.agent_name} speaks {peer.plane}, this pod {PLANE_NAME}",
                stage="connect",
                remedy="start both pods with the same data plane",
            )
        if peer.agent_name in self._links:
            raise TransferFailed(f"already connected to {peer.agent_name}", stage="connect")
        if not self._fabric.reachable(peer.agent_name):
            raise PeerLost(f"no agent {peer.agent_name} on this fabric", stage="connect")
        link = LoopbackLink(peer, AddressRanges(peer.agent_name, peer.regions))
        self._links[peer.agent_name] = link
        return link

    def post(self, link: Link, writes: Sequence[Write]) -> LoopbackHandle:
        ranges = self._require_open()
        link = self._own(link)
        table = write_table(writes)
        ranges.check(table[:, 0], table[:, 2])
        link.ranges.check(table[:, 1], table[:, 2])
        if link.lost or not self._fabric.reachable(link.endpoint.agent_name):
            link.lost = True
            raise PeerLost(f"peer {link.endpoint.agent_name} is gone", stage="transfer")
        return LoopbackHandle(link, table)

    def poll(self, handle: Handle) -> Polled:
        handle = _usable(handle)
        if handle.state is HandleState.POSTED:
            self._advance(handle)
        failed = handle.state is HandleState.FAILED
        return Polled(handle.state, handle.error, peer_lost=failed and handle.link.lost)

    def release(self, handle: Handle) -> None:
        handle = _usable(handle)
        if handle.state is HandleState.POSTED:
            raise InternalError("released a handle that still writes", stage="transfer")
        handle.released = True

    def transports(self) -> tuple[str, ...]:
        return ("memory",)

    def disconnect(self, link: Link) -> None:
        link = self._own(link)
        del self._links[link.endpoint.agent_name]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._links.clear()
            self._fabric.kill(self._agent_name)

    def _advance(self, handle: LoopbackHandle) -> None:
        assert self._sources
        name = handle.link.endpoint.agent_name
        if self._links.get(name) is not handle.link:
            handle.state, handle.error = HandleState.FAILED, f"disconnected from {name}"
            return
        handle.state = self._fabric.deliver(self._sources, name, handle.table)
        if handle.state is HandleState.FAILED:
            handle.link.lost, handle.error = True, f"peer {name} is gone"

    def _require_open(self) -> AddressRanges:
        if self._ranges is None or self._closed:
            raise InternalError("the plane is not open", stage="transfer")
        return self._ranges

    def _own(self, link: Link) -> LoopbackLink:
        assert isinstance(link, LoopbackLink)
        if self._links.get(link.endpoint.agent_name) is not link:
            raise TransferFailed(
                f"no connection to {link.endpoint.agent_name}", stage="transfer", remedy="reconnect"
            )
        return link


def _usable(handle: Handle) -> LoopbackHandle:
    assert isinstance(handle, LoopbackHandle)
    if handle.released:
        raise InternalError("used a handle after its release", stage="transfer")
    return handle


def _check_in_arena(arena: Tensor, regions: Sequence[Region]) -> None:
    start = arena.data_ptr()
    whole = Region("arena", 0, start, arena.numel() * arena.element_size(), 1)
    inside = AddressRanges("the arena", [whole])
    addresses = np.array([region.address for region in regions], dtype=np.uint64)
    sizes = np.array([region.num_rows * region.row_bytes for region in regions], dtype=np.uint64)
    inside.check(addresses, sizes)
