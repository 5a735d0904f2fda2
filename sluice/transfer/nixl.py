"""The NIXL plane: one agent a pod process, WRITEs from prefill's arena into decode's.

What NIXL does not do, and this file and ``transfer.worker`` therefore do: check addresses (a wrapping length is a
segfault of the initiator), keep a released handle from being used (another one), tell a dead peer from a bug, give
up waiting. Nothing can cancel a posted write: only settling, or the peer's death, ends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sluice.errors import InternalError, PeerLost, TransferFailed
from sluice.pools.base import Region
from sluice.transfer.nixl_runtime import create_agent, load_nixl
from sluice.transfer.plane import Endpoint, Handle, HandleState, Link, Polled, Write
from sluice.transfer.ranges import AddressRanges, WriteTable, write_table
from sluice.transfer.staging import region_of
from sluice.transfer.ucx_log import ucx_log

if TYPE_CHECKING:
    from torch import Tensor

PLANE_NAME = "nixl"

# The wheel's exceptions have no common base; they are told apart by name, so that any wheel's classes match.
_PEER_GONE = frozenset({"nixlRemoteDisconnectError"})
_LIKELY_CAUSE = {
    "nixlNotFoundError": "the peer's metadata is stale or its region is not registered; reconnect",
    "nixlNotAllowedError": "an older agent of this name is still loaded; use a new name each epoch",
    "nixlInvalidParamError": "descriptor lists differ in length or size; a bug of ours",
    "nixlBackendError": "UCX reset the connection; check UCX_TLS and UCX_NET_DEVICES on both pods",
}


@dataclass
class NixlLink:
    endpoint: Endpoint
    ranges: AddressRanges
    lost: bool = False


@dataclass
class NixlHandle:
    """Owns NIXL's handle. ``request`` is None once released: NIXL itself would read freed memory."""

    link: NixlLink
    request: Any
    num_bytes: int
    state: HandleState = HandleState.POSTED
    error: str = ""


class NixlPlane:
    """``transfer.plane.Plane`` over NIXL and UCX.

    An initiator (prefill) polls for itself; a target (decode) needs a progress thread to receive at all.
    ``agent_name`` must be new in each epoch: a peer that still holds an older agent of the name refuses it.
    """

    def __init__(self, agent_name: str, *, initiator: bool) -> None:
        self._agent_name = agent_name
        self._initiator = initiator
        self._agent: Any = None
        self._registered: tuple[Tensor, ...] = ()
        self._ranges: AddressRanges | None = None
        self._memory = "DRAM"
        self._device = 0
        self._links: dict[str, NixlLink] = {}
        self._handles: dict[int, NixlHandle] = {}

    @property
    def initiator(self) -> bool:
        return self._initiator

    def open(
        self, arena: Tensor, regions: Sequence[Region], staging: Tensor | None = None
    ) -> Endpoint:
        """Create the agent and register ``arena`` and ``staging`` (contiguous uint8, CPU or CUDA)."""
        if self._registered:
            raise InternalError("the plane was opened before", stage="transfer")
        whole = (arena,) if staging is None else (arena, staging)
        if not all(memory.is_contiguous() for memory in whole):
            raise InternalError("the arena must be one contiguous tensor", stage="transfer")
        ranges = AddressRanges(self._agent_name, [*regions, *map(region_of, whole[1:])])
        if arena.is_cuda:
            self._memory, self._device = "VRAM", arena.get_device()
        api = load_nixl(_cuda_major() if arena.is_cuda else None)
        self._agent = create_agent(api, self._agent_name, progress_thread=not self._initiator)
        stretches = [
            (one.data_ptr(), one.numel() * one.element_size(), self._device, "") for one in whole
        ]
        self._agent.register_memory(stretches, self._memory)
        self._registered, self._ranges = whole, ranges  # NIXL keeps no tensor alive; we do
        return Endpoint(
            plane=PLANE_NAME,
            agent_name=self._agent_name,
            metadata=self._agent.get_agent_metadata(),
            memory=self._memory,
            device=self._device,
            regions=tuple(regions),
        )

    def connect(self, peer: Endpoint) -> NixlLink:
        agent = self._require_open()
        _check_speaks_nixl(peer)
        ranges = AddressRanges(peer.agent_name, peer.regions)
        if peer.agent_name in self._links or peer.agent_name == self._agent_name:
            raise TransferFailed(
                f"agent {peer.agent_name} is connected already",
                stage="connect",
                remedy="each epoch of a pod must take a new agent name",
            )
        try:
            loaded = agent.add_remote_agent(peer.metadata)
        except Exception as error:
            raise _typed(error, f"connect to {peer.agent_name}", "connect") from error
        name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
        if name != peer.agent_name:
            if name not in self._links:
                agent.remove_remote_agent(name)
            raise TransferFailed(
                f"metadata of agent {name!r} came under the name {peer.agent_name!r}",
                stage="connect",
            )
        link = NixlLink(peer, ranges)
        self._links[peer.agent_name] = link
        return link

    def post(self, link: Link, writes: Sequence[Write]) -> NixlHandle:
        """Post one group as one NIXL request.

        ``initialize_xfer`` over our own runs, not prepared lists: measured on 4 MB groups both move the same bytes a
        second within noise (set-up 60-300 us against 20-160 us), and prepared lists would need one index for each
        row (4096 for a group of 1 KB rows), a list per region and peer, and NIXL's silent int32 cast.
        """
        agent, ranges = self._require_open(), self._ranges
        assert ranges is not None
        link = self._own(link)
        table = write_table(writes)
        ranges.check(table[:, 0], table[:, 2])
        link.ranges.check(table[:, 1], table[:, 2])
        peer = link.endpoint
        if link.lost:
            raise PeerLost(f"peer {peer.agent_name} is gone", stage="transfer")
        num_bytes = int(table[:, 2].sum())
        try:
            request = agent.initialize_xfer(
                "WRITE",
                agent.get_xfer_descs(_descriptors(table, 0, self._device), self._memory),
                agent.get_xfer_descs(_descriptors(table, 1, peer.device), peer.memory),
                peer.agent_name,
            )
        except Exception as error:
            raise _typed(error, _describe(peer, table), "transfer") from error
        handle = NixlHandle(link, request, num_bytes)
        self._handles[id(handle)] = handle
        self._observe(handle, agent.transfer)  # what fails from here on may have sent a part
        return handle

    def poll(self, handle: Handle) -> Polled:
        handle = _usable(handle)
        if handle.state is HandleState.POSTED:
            self._observe(handle, self._require_open().check_xfer_state)
        failed = handle.state is HandleState.FAILED
        return Polled(handle.state, handle.error, peer_lost=failed and handle.link.lost)

    def release(self, handle: Handle) -> None:
        handle = _usable(handle)
        if handle.state is HandleState.POSTED:
            raise InternalError("released a handle that still writes", stage="transfer")
        self._drop(handle)

    def transports(self) -> tuple[str, ...]:
        return ucx_log().transports(self._agent_name)

    def disconnect(self, link: Link) -> None:
        link = self._own(link)
        for handle in list(self._handles.values()):
            if handle.link is link and handle.state is HandleState.POSTED:
                handle.state = HandleState.FAILED
                handle.error = f"disconnected from {link.endpoint.agent_name}"
        del self._links[link.endpoint.agent_name]
        self._require_open().remove_remote_agent(link.endpoint.agent_name)

    def close(self) -> None:
        """Handles first, peers second, the agent last; NIXL crashes in other orders. The arena stays alive."""
        if self._agent is None:
            return
        for handle in list(self._handles.values()):
            self._drop(handle)
        for name in list(self._links):
            self._agent.remove_remote_agent(name)
        self._links.clear()
        self._agent = None

    def _observe(self, handle: NixlHandle, call: Any) -> None:
        """Make the one NIXL call that tells a handle's state, and keep what it says."""
        peer = handle.link.endpoint
        try:
            status = call(handle.request)
        except Exception as error:
            self.transports()  # brings what UCX says of it into the log
            handle.state = HandleState.FAILED
            handle.link.lost = handle.link.lost or type(error).__name__ in _PEER_GONE
            handle.error = f"{handle.num_bytes} bytes to {peer.agent_name}: {_explain(error)}"
            return
        if status == "DONE":
            handle.state = HandleState.DONE
        elif status != "PROC":
            handle.state = HandleState.FAILED
            handle.error = f"{handle.num_bytes} bytes to {peer.agent_name}: NIXL says {status}"

    def _drop(self, handle: NixlHandle) -> None:
        request, handle.request = handle.request, None
        self._handles.pop(id(handle), None)
        self._agent.release_xfer_handle(request)

    def _require_open(self) -> Any:
        if self._agent is None:
            raise InternalError("the plane is not open", stage="transfer")
        return self._agent

    def _own(self, link: Link) -> NixlLink:
        assert isinstance(link, NixlLink)
        if self._links.get(link.endpoint.agent_name) is not link:
            raise TransferFailed(
                f"no connection to {link.endpoint.agent_name}", stage="transfer", remedy="reconnect"
            )
        return link


def _cuda_major() -> int | None:
    import torch  # only a pod with device memory needs to know

    return None if torch.version.cuda is None else int(torch.version.cuda.split(".")[0])


def _usable(handle: Handle) -> NixlHandle:
    assert isinstance(handle, NixlHandle)
    if handle.request is None:
        raise InternalError("used a handle after its release", stage="transfer")
    return handle


def _check_speaks_nixl(peer: Endpoint) -> None:
    if peer.plane != PLANE_NAME:
        raise TransferFailed(
            f"peer {peer.agent_name} speaks {peer.plane}, this pod {PLANE_NAME}",
            stage="connect",
            remedy="start both pods with the same data plane",
        )
    if peer.memory not in ("DRAM", "VRAM") or peer.device < 0:
        raise TransferFailed(
            f"peer {peer.agent_name} declares memory {peer.memory!r} on device {peer.device}",
            stage="connect",
        )


def _descriptors(table: WriteTable, column: int, device: int) -> NDArray[np.uint64]:
    """NIXL's [N, 3] list (address, length, device) of one side of the writes."""
    descriptors = np.empty((len(table), 3), dtype=np.uint64)
    descriptors[:, 0] = table[:, column]
    descriptors[:, 1] = table[:, 2]
    descriptors[:, 2] = device
    return descriptors


def _describe(peer: Endpoint, table: WriteTable) -> str:
    first, last = int(table[:, 1].min()), int((table[:, 1] + table[:, 2]).max())
    return (
        f"{len(table)} writes, {int(table[:, 2].sum())} bytes into {peer.memory} "
        f"{first:#x}..{last:#x} of {peer.agent_name}"
    )


def _explain(error: Exception) -> str:
    name = type(error).__name__
    cause = _LIKELY_CAUSE.get(name, "")
    return f"{name}: {error}" + (f" ({cause})" if cause else "")


def _typed(error: Exception, what: str, stage: str) -> TransferFailed | PeerLost:
    name = type(error).__name__
    if name in _PEER_GONE:
        return PeerLost(f"{what}: {name}: {error}", stage=stage)
    return TransferFailed(
        f"{what}: {name}: {error}", stage=stage, remedy=_LIKELY_CAUSE.get(name, "")
    )
