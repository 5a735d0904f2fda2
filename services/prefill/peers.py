"""Which decode pods this prefill has agreed with: one entry an epoch, with the route its attempts write through."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from sluice.errors import StaleEpoch
from sluice.layout.layout import Layout
from sluice.layout.negotiate import Agreement, Refusal, negotiate
from sluice.pools.base import Region
from sluice.telemetry.logging import get_logger
from sluice.transfer.plane import Endpoint, Link
from sluice.transfer.sender import Route
from sluice.transfer.worker import TransferWorker
from sluice.types import AttemptId, Epoch

log = get_logger(__name__)


@dataclass
class DecodePeer:
    """One agreed decode process. ``attempts`` are those that may still write to it."""

    epoch: Epoch
    agreement: Agreement
    route: Route
    last_seen_s: float
    attempts: set[AttemptId] = field(default_factory=set)


class Peers:
    """Owns the pairings of this pod. All methods run on the event loop.

    A decode pod that falls silent is forgotten once nothing of it is being written; it pairs again by itself.
    """

    def __init__(
        self,
        layout: Layout,
        regions: tuple[Region, ...],
        worker: TransferWorker,
        *,
        connect_timeout_s: float = 10.0,
        forget_after_s: float = 30.0,
    ) -> None:
        self._layout = layout
        self._regions = regions
        self._worker = worker
        self._connect_timeout_s = connect_timeout_s
        self._forget_after_s = forget_after_s
        self._peers: dict[Epoch, DecodePeer] = {}
        self._pairing: dict[Epoch, asyncio.Lock] = {}

    def __len__(self) -> int:
        return len(self._peers)

    async def pair(
        self, layout: Layout, epoch: Epoch, endpoint: Endpoint, *, allow_missing_draft: bool
    ) -> Agreement | Refusal:
        """Run the gate against a decode pod and, if it agrees, connect to its memory. Idempotent an epoch.

        Raises ``PeerLost`` or ``TransferFailed`` when the gate agrees but the memory can't be reached.
        """
        outcome = negotiate(self._layout, layout, allow_missing_draft=allow_missing_draft)
        if isinstance(outcome, Refusal):
            log.warning("pair_refused", decode_epoch=epoch, mismatches=len(outcome.mismatches))
            return outcome
        async with self._pairing.setdefault(epoch, asyncio.Lock()):
            if epoch not in self._peers:
                link = await self._connect(endpoint)
                route = Route(link, outcome.plans, self._regions, endpoint.regions)
                self._peers[epoch] = DecodePeer(epoch, outcome, route, time.monotonic())
                log.info("pair_agreed", decode_epoch=epoch, agreement=outcome.digest)
        del self._pairing[epoch]
        return outcome

    def require(self, epoch: Epoch, agreement_digest: str) -> DecodePeer:
        """The agreed peer a Start speaks for. Raises ``StaleEpoch`` when this pod knows no such pairing."""
        peer = self._peers.get(epoch)
        if peer is None:
            raise StaleEpoch(
                f"no handshake with decode epoch {epoch}",
                stage="grant",
                remedy="decode must repeat the handshake",
            )
        if peer.agreement.digest != agreement_digest:
            raise StaleEpoch(
                f"Start names agreement {agreement_digest}, this pod agreed on {peer.agreement.digest}",
                stage="grant",
                remedy="decode must repeat the handshake",
            )
        return peer

    def seen(self, epoch: Epoch) -> bool:
        """Note a sign of life; False when this pod has no pairing with that epoch."""
        peer = self._peers.get(epoch)
        if peer is not None:
            peer.last_seen_s = time.monotonic()
        return peer is not None

    async def forget_silent(self) -> None:
        """Drop peers that fell silent and have no attempt that may still write."""
        now = time.monotonic()
        for peer in list(self._peers.values()):
            if now - peer.last_seen_s > self._forget_after_s and not peer.attempts:
                del self._peers[peer.epoch]
                await asyncio.wrap_future(self._worker.disconnect(peer.route.link))
                log.info("peer_forgotten", decode_epoch=peer.epoch)

    async def _connect(self, endpoint: Endpoint) -> Link:
        async with asyncio.timeout(self._connect_timeout_s):
            return await asyncio.wrap_future(self._worker.connect(endpoint))
