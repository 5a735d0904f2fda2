"""What makes an agreed peer proven and keeps it so: canaries, the first one at once, then again and again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from services.decode.peer import Peer, PeerTimes
from sluice.errors import DeadlineExceeded, Overloaded, SluiceError
from sluice.rpc.messages import CanaryStatus
from sluice.telemetry.logging import get_logger

log = get_logger(__name__)
RESERVING = "reserve"  # stage of errors about our own capacity
Prove = Callable[[str], Awaitable[CanaryStatus]]


class Proving:
    """``changed`` is called when a peer became proven, or is so no more. All methods run on the event loop."""

    def __init__(self, times: PeerTimes, changed: Callable[[], None]) -> None:
        self._times = times
        self._changed = changed
        self._one = asyncio.Lock()  # its cost is bounded: never two at once
        # Set once, before the first peer; None: peers need no proof.
        self.canary: Prove | None = None

    async def first(self, peer: Peer) -> None:
        """Readiness counts a peer only after every component really crossed. Raises what the canary raised."""
        while self.canary is not None and not peer.proven:
            try:
                await self._run(self.canary, peer)
                break
            except (Overloaded, DeadlineExceeded) as error:
                if error.stage != RESERVING:
                    self._failed(peer, error)
                    raise
                # Our own pools are full, which says nothing about the peer.
                await asyncio.sleep(self._times.retry_s)
            except SluiceError as error:
                self._failed(peer, error)
                raise
        peer.proven = True
        self._changed()

    async def again(self, peer: Peer) -> None:
        """Beside the pings, for ever: a pair that stopped moving state turns red, and green again by itself.

        Running requests are left alone; each proves its own state. New ones go elsewhere.
        """
        while self.canary is not None:
            times = self._times
            await asyncio.sleep(times.canary_every_s if peer.proven else times.canary_retry_s)
            served = peer.served
            try:
                await self._run(self.canary, peer)
            except (Overloaded, DeadlineExceeded) as error:
                # Full pools, here or there. Without any request that got through it is not mere load.
                if error.stage == RESERVING or peer.served > served:
                    continue
                self._failed(peer, error)
            except SluiceError as error:
                self._failed(peer, error)
            else:
                if not peer.proven:
                    log.info("canary_recovered", peer=peer.address)
                peer.proven = True
                self._changed()

    async def _run(self, canary: Prove, peer: Peer) -> None:
        async with self._one:
            peer.canary = await canary(peer.address)
        peer.canary_passed_unix_s = peer.canary.finished_unix_s

    def _failed(self, peer: Peer, error: SluiceError) -> None:
        peer.unproven = f"its canary failed: {error}"
        peer.canary = CanaryStatus(time.time(), 0.0, str(error))
        peer.proven = False
        log.warning("canary_failed", peer=peer.address, error=str(error), code=error.code)
        self._changed()
