"""Which decode pods this prefill has agreed with: one entry an epoch, with the route its attempts write through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from services.sides import Sides
from sluice.errors import BadRequest, StaleEpoch
from sluice.layout.layout import Layout
from sluice.layout.negotiate import Agreement, Refusal, negotiate
from sluice.telemetry.logging import get_logger
from sluice.transfer.plane import Endpoint
from sluice.transfer.side import Meeting
from sluice.types import AttemptId, Epoch

log = get_logger(__name__)
_REMEMBERED_REFUSALS = 1000


@dataclass
class DecodePeer:
    """One agreed decode process. ``attempts`` are those that may still write to it."""

    epoch: Epoch
    agreement: Agreement
    last_seen_s: float
    attempts: set[AttemptId] = field(default_factory=set)


class Peers:
    """Owns the pairings of this pod. All methods run on the event loop.

    A decode pod that falls silent is forgotten once nothing of it is being written; it pairs again by itself.
    """

    def __init__(
        self,
        layout: Layout,
        sides: Sides,
        *,
        connect_timeout_s: float = 10.0,
        forget_after_s: float = 30.0,
    ) -> None:
        self._layout = layout
        self._sides = sides
        self._connect_timeout_s = connect_timeout_s
        self._forget_after_s = forget_after_s
        self._peers: dict[Epoch, DecodePeer] = {}
        self._joining: dict[Epoch, asyncio.Task[None]] = {}
        self._refusals: dict[Epoch, str] = {}  # what was logged
        self.on_refused: Callable[[Refusal], None] = lambda _refusal: (
            None
        )  # once a process and reason

    def __len__(self) -> int:
        return len(self._peers)

    async def pair(
        self,
        layout: Layout,
        epoch: Epoch,
        endpoints: tuple[Endpoint, ...],
        *,
        allow_missing_draft: bool,
    ) -> Agreement | Refusal:
        """Run the gate against a decode pod and, if it agrees, connect to its memory. Idempotent an epoch.

        Raises ``PeerLost`` or ``TransferFailed`` when the gate agrees but the memory can't be reached.
        """
        outcome = negotiate(self._layout, layout, allow_missing_draft=allow_missing_draft)
        if isinstance(outcome, Refusal):
            self._log_refusal(epoch, outcome)
            return outcome
        if len(endpoints) != outcome.ranks[1]:
            raise BadRequest(
                f"{len(endpoints)} endpoints of {outcome.ranks[1]} ranks", field="endpoints"
            )
        await self._drop_broken(epoch)
        if epoch not in self._peers:
            async with asyncio.timeout(self._connect_timeout_s):
                await asyncio.shield(self._joining_of(epoch, outcome, endpoints))
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
                await self._sides.disconnect(peer.epoch)
                log.info("peer_forgotten", decode_epoch=peer.epoch)

    def _joining_of(
        self, epoch: Epoch, agreement: Agreement, endpoints: tuple[Endpoint, ...]
    ) -> asyncio.Task[None]:
        """The one task that connects to this epoch. No caller's cancellation may end it: the I/O thread connects
        all the same, and a link that nobody recorded would bar the epoch for ever.
        """
        task = self._joining.get(epoch)
        if task is None:
            task = asyncio.create_task(self._join(epoch, agreement, endpoints))
            self._joining[epoch] = task
            task.add_done_callback(lambda done: self._join_ended(epoch, done))
        return task

    async def _join(
        self, epoch: Epoch, agreement: Agreement, endpoints: tuple[Endpoint, ...]
    ) -> None:
        await self._sides.connect(Meeting(epoch, agreement.plans, endpoints))
        self._peers[epoch] = DecodePeer(epoch, agreement, time.monotonic())
        log.info("pair_agreed", decode_epoch=epoch, agreement=agreement.digest)

    def _join_ended(self, epoch: Epoch, done: asyncio.Task[None]) -> None:
        del self._joining[epoch]
        if not done.cancelled() and done.exception() is not None:
            log.warning("connect_failed", decode_epoch=epoch, error=str(done.exception()))

    async def _drop_broken(self, epoch: Epoch) -> None:
        """A link that broke stays broken; with nothing in flight it can be made anew."""
        peer = self._peers.get(epoch)
        if peer is None or peer.attempts or not await self._sides.lost(epoch):
            return
        if self._peers.pop(epoch, None) is not None:  # nobody else dropped it meanwhile
            await self._sides.disconnect(epoch)

    def _log_refusal(self, epoch: Epoch, refusal: Refusal) -> None:
        """Once a decode process and reason: a refused pod asks again every few seconds."""
        if self._refusals.get(epoch) != refusal.summary():
            if len(self._refusals) >= _REMEMBERED_REFUSALS:
                self._refusals.clear()
            self._refusals[epoch] = refusal.summary()
            self.on_refused(refusal)
            log.warning("pair_refused", decode_epoch=epoch, reason=refusal.summary())
