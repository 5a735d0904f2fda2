"""Protobuf <-> plain data for what pods say of themselves and of each other."""

from __future__ import annotations

from collections.abc import Iterable

from sluice.rpc.convert_decode import moved_from_pb, moved_to_pb
from sluice.rpc.messages import (
    Acceptance,
    CanaryStatus,
    DecodeStatus,
    PeerStatus,
    PoolComponent,
    PoolStatus,
    PrefillStatus,
)
from sluice.types import Epoch
from sluice.v1 import decode_pb2, prefill_pb2


def status_to_pb(status: DecodeStatus) -> decode_pb2.GetStatusResponse:
    return decode_pb2.GetStatusResponse(
        epoch=status.epoch,
        ready=status.ready,
        reason=status.reason,
        queued=status.queued,
        running=status.running,
        max_model_tokens=status.max_model_tokens,
        peers=[_peer_to_pb(peer) for peer in status.peers],
        pools=_pools_to_pb(status.pools),
        retractions=status.retractions,
        acceptance=decode_pb2.Acceptance(
            drafts=status.acceptance.drafts,
            recent_tokens=status.acceptance.recent_tokens,
            steps=status.acceptance.steps,
            collapsed=status.acceptance.collapsed,
        ),
        capacity=status.capacity,
    )


def status_from_pb(status: decode_pb2.GetStatusResponse) -> DecodeStatus:
    acceptance = status.acceptance
    return DecodeStatus(
        epoch=Epoch(status.epoch),
        ready=status.ready,
        reason=status.reason,
        queued=status.queued,
        running=status.running,
        max_model_tokens=status.max_model_tokens,
        peers=tuple(_peer_from_pb(peer) for peer in status.peers),
        pools=_pools_from_pb(status.pools),
        retractions=status.retractions,
        acceptance=Acceptance(
            acceptance.drafts, acceptance.recent_tokens, acceptance.steps, acceptance.collapsed
        ),
        capacity=status.capacity,
    )


def prefill_status_to_pb(status: PrefillStatus) -> prefill_pb2.GetPrefillStatusResponse:
    return prefill_pb2.GetPrefillStatusResponse(
        epoch=status.epoch,
        ready=status.ready,
        reason=status.reason,
        queued=status.queued,
        running=status.running,
        paired=status.paired,
        attempts=status.attempts,
        pools=_pools_to_pb(status.pools),
        capacity=status.capacity,
    )


def prefill_status_from_pb(status: prefill_pb2.GetPrefillStatusResponse) -> PrefillStatus:
    return PrefillStatus(
        epoch=Epoch(status.epoch),
        ready=status.ready,
        reason=status.reason,
        queued=status.queued,
        running=status.running,
        paired=status.paired,
        attempts=status.attempts,
        pools=_pools_from_pb(status.pools),
        capacity=status.capacity,
    )


def _peer_to_pb(peer: PeerStatus) -> decode_pb2.PeerStatus:
    return decode_pb2.PeerStatus(
        address=peer.address,
        epoch=peer.epoch,
        state=peer.state,
        reason=peer.reason,
        agreement_digest=peer.agreement_digest,
        quarantined_attempts=peer.quarantined_attempts,
        canary=None if peer.canary is None else _canary_to_pb(peer.canary),
        prefill=None if peer.prefill is None else prefill_status_to_pb(peer.prefill),
    )


def _peer_from_pb(peer: decode_pb2.PeerStatus) -> PeerStatus:
    return PeerStatus(
        peer.address,
        peer.epoch,
        peer.state,
        peer.reason,
        peer.agreement_digest,
        peer.quarantined_attempts,
        _canary_from_pb(peer.canary) if peer.HasField("canary") else None,
        prefill_status_from_pb(peer.prefill) if peer.HasField("prefill") else None,
    )


def _canary_to_pb(canary: CanaryStatus) -> decode_pb2.CanaryStatus:
    return decode_pb2.CanaryStatus(
        finished_unix_s=canary.finished_unix_s,
        seconds=canary.seconds,
        failure=canary.failure,
        transport=canary.transport,
        components=[moved_to_pb(moved) for moved in canary.components],
    )


def _canary_from_pb(canary: decode_pb2.CanaryStatus) -> CanaryStatus:
    return CanaryStatus(
        canary.finished_unix_s,
        canary.seconds,
        canary.failure,
        canary.transport,
        moved_from_pb(canary.components),
    )


def _pools_to_pb(pools: Iterable[PoolStatus]) -> list[prefill_pb2.PoolStatus]:
    return [
        prefill_pb2.PoolStatus(
            space=pool.space,
            total=pool.total,
            free=pool.free,
            held=pool.held,
            quarantined=pool.quarantined,
            cached=pool.cached,
            components=[
                prefill_pb2.PoolComponent(name=component.name, bytes=component.num_bytes)
                for component in pool.components
            ],
        )
        for pool in pools
    ]


def _pools_from_pb(pools: Iterable[prefill_pb2.PoolStatus]) -> tuple[PoolStatus, ...]:
    return tuple(
        PoolStatus(
            pool.space,
            pool.total,
            pool.free,
            pool.held,
            pool.quarantined,
            pool.cached,
            tuple(PoolComponent(part.name, part.bytes) for part in pool.components),
        )
        for pool in pools
    )
