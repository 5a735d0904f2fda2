"""The agreement matrix: every decode pod with every prefill pod, what stands between them, and who is usable."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from services.discovery.registry import PodRecord, PodState
from services.router.fleet import Pair
from services.router.watch import DecodeWatch
from sluice.rpc.messages import PeerStatus
from sluice.types import Epoch

_NOT_READY = "discovery doesn't call it ready"
_LEAVING = "discovery says that it is being removed"


@dataclass(frozen=True)
class Cell:
    """``reason`` is empty exactly when requests may go there, breakers aside. ``peer``: decode's word on prefill.

    ``doubt``: the pods themselves say that they can, but the platform doesn't call one of them ready.
    """

    pair: Pair
    state: str
    reason: str
    peer: PeerStatus | None
    doubt: str = ""


def settled(cells: Sequence[Cell]) -> list[Cell]:
    """A doubted pair is used when there is no other.

    The pods' own word is a second old; a platform's is its last probe's, and when a busy node is late with all of its
    probes, taking their silence for a no would stop a fleet that serves.
    """
    if any(not (cell.reason or cell.doubt) for cell in cells):
        return [replace(cell, reason=cell.reason or cell.doubt) for cell in cells]
    return list(cells)


def decode_problem(record: PodRecord, watch: DecodeWatch) -> str:
    """Why no request may go to this decode pod, whatever the prefill; empty when one may."""
    if record.state is PodState.DRAINING:
        return _LEAVING
    if watch.status is None:
        return watch.problem
    return "" if watch.status.ready else watch.status.reason or "not ready"


def cells_of(
    record: PodRecord,
    watch: DecodeWatch,
    prefills: Mapping[str, PodRecord],
    *,
    any_prefill: bool,
) -> Iterator[Cell]:
    """One row. ``any_prefill``: also those that only this decode pod names."""
    problem = decode_problem(record, watch)
    status = watch.status
    peers = {peer.address: peer for peer in status.peers} if status else {}
    for address in sorted(set(prefills) | (set(peers) if any_prefill else set())):
        peer = peers.get(address)
        if peer is None or status is None:
            why = problem or f"prefill {address} is unknown to it"
            yield Cell(Pair(record.address, address), "unknown", why, None)
            continue
        pair = Pair(record.address, address, status.epoch, Epoch(peer.epoch), peer.agreement_digest)
        prefill = prefills.get(address)
        why = problem or _prefill_problem(prefill, peer)
        yield Cell(pair, peer.state, why, peer, _doubt(record, prefill))


def _prefill_problem(record: PodRecord | None, peer: PeerStatus) -> str:
    if peer.state != "agreed":
        return f"prefill {peer.address} is {peer.state}: {peer.reason or 'no reason'}"
    if record is not None and record.state is PodState.DRAINING:
        return f"prefill {peer.address}: {_LEAVING}"
    return ""


def _doubt(decode: PodRecord, prefill: PodRecord | None) -> str:
    if decode.state is PodState.STARTING:
        return _NOT_READY
    if prefill is not None and prefill.state is PodState.STARTING:
        return f"prefill {prefill.address}: {_NOT_READY}"
    return ""
