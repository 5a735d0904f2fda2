"""The prefill pods a decode pod may use: handshake, heartbeat, epoch, and quarantine of what they may write."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable

from services.decode.peer import UNPROVEN, Held, Peer, PeerState, PeerTimes
from services.decode.proving import Proving
from services.discovery.registry import PodState, RegistryView
from services.environment import split_address
from sluice.errors import (
    LayoutRefused,
    NotReady,
    PeerLost,
    SluiceError,
    StaleEpoch,
)
from sluice.layout.layout import Layout
from sluice.layout.negotiate import Agreement, Refusal, negotiate
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.messages import PeerStatus
from sluice.rpc.prefill_link import PingAnswer, PrefillLink
from sluice.telemetry.logging import get_logger
from sluice.transfer.grant import GrantEvent
from sluice.transfer.plane import Endpoint
from sluice.types import AttemptId, Epoch, Role

log = get_logger(__name__)
_NO_EPOCH = Epoch("")


class Peers:
    """Owns the pairings of this pod: one keeper task an address. All methods run on the event loop."""

    def __init__(
        self,
        layout: Layout,
        epoch: Epoch,
        endpoints: tuple[Endpoint, ...],
        *,
        allow_missing_draft: bool,
        times: PeerTimes | None = None,
        channel: ChannelConfig | None = None,
    ) -> None:
        self._layout = layout
        self._epoch = epoch
        self._endpoints = endpoints
        self._allow_missing_draft = allow_missing_draft
        self._times = times or PeerTimes()
        self._channel = channel
        self._peers: dict[str, Peer] = {}
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._change = asyncio.Event()
        self.discovery_problem = ""
        self.on_refused: Callable[[Refusal], None] = lambda _refusal: None
        self.quarantines = 0  # since the start
        self.proving = Proving(self._times, self._change.set)

    def follow(self, view: RegistryView) -> None:
        """Keep a pairing with every prefill that discovery knows, and with no other once it isn't needed."""
        self.discovery_problem = view.problem
        prefills = view.of(Role.PREFILL)
        for address, pod in prefills.items():
            peer = self.add(address)
            peer.leaving, peer.gone = pod.state is PodState.DRAINING, False
        for address in self._peers.keys() - prefills.keys():
            self._peers[address].leaving = self._peers[address].gone = True
        self._change.set()

    def add(self, address: str) -> Peer:
        """Start to keep a pairing with this address; idempotent."""
        if address not in self._peers:
            peer = Peer(address, PrefillLink(address, self._channel))
            self._peers[address] = peer
            self._keepers[address] = asyncio.create_task(self._keep(peer))
        return self._peers[address]

    async def close(self) -> None:
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)
        for peer in self._peers.values():
            await peer.link.close()

    def all(self) -> tuple[Peer, ...]:
        return tuple(self._peers.values())

    def statuses(self) -> tuple[PeerStatus, ...]:
        return tuple(peer.status() for peer in self._peers.values())

    def paired(self) -> bool:
        """At least one prefill has agreed, its canary passed, and it isn't on its way out."""
        return any(peer.usable for peer in self._peers.values())

    def epoch_of(self, address: str) -> Epoch:
        return self._peers[address].epoch

    async def changed(self, timeout_s: float) -> None:
        """Wait until any peer's state changed, at most ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._change.wait()
        self._change.clear()

    def require(
        self, address: str, *, proving: bool = False, epoch: Epoch = _NO_EPOCH, digest: str = ""
    ) -> tuple[Peer, Agreement]:
        """The agreed peer at this address. Raises ``NotReady`` or ``LayoutRefused`` with the reason.

        ``proving``: for the canary, which is what makes a peer proven. ``epoch`` and ``digest``: what the caller
        believes of the pairing, empty = nothing; raises ``StaleEpoch`` when it is another one by now.
        """
        peer = self._peers.get(address)
        if peer is None:
            raise NotReady(
                f"no pairing with prefill {address!r}",
                stage="pairing",
                remedy="add it to the decode pod's peers",
            )
        known = peer.agreement.digest if peer.agreement else ""
        if (epoch and epoch != peer.epoch) or (digest and digest != known):
            raise StaleEpoch(
                f"prefill {address} is epoch {peer.epoch} with agreement {known or 'none'}, "
                f"the request was for epoch {epoch} with {digest}",
                stage="pairing",
                remedy="choose a pair anew",
            )
        if peer.state is PeerState.REFUSED:
            raise LayoutRefused(f"{address}: {peer.reason}", stage="pairing")
        if peer.state is not PeerState.AGREED or peer.agreement is None:
            raise NotReady(
                f"prefill {address} is {peer.state.value}: {peer.reason}", stage="pairing"
            )
        if not (peer.proven or proving):
            raise NotReady(f"prefill {address}: {peer.unproven}", stage="pairing")
        if peer.closing:
            raise NotReady(f"prefill {address} is on its way out", stage="pairing")
        return peer, peer.agreement

    async def negotiated(self, address: str, timeout_s: float) -> Agreement | Refusal:
        """Run the handshake now, for ``Pair``: the outcome with every mismatch."""
        peer = self.add(address)
        async with asyncio.timeout(timeout_s):
            return await self._handshake(peer)

    async def _keep(self, peer: Peer) -> None:
        """Handshake, canary, then ping until the peer is lost or restarted; until discovery drops it."""
        while True:
            try:
                await self._keep_once(peer)
            except Exception as error:
                # A bug must show in the status, and must not stop the keeper.
                log.exception("keeper_failed", peer=peer.address)
                self._set(peer, PeerState.LOST, f"{type(error).__name__}: {error}")
            if peer.forgettable:
                break
            refused = peer.state is PeerState.REFUSED
            await asyncio.sleep(self._times.refused_retry_s if refused else self._times.retry_s)
        self._peers.pop(peer.address)  # at once with the check: an ``add`` from now on starts anew
        self._keepers.pop(peer.address)
        self._change.set()
        log.info("peer_forgotten", address=peer.address)
        await peer.link.close()

    async def _keep_once(self, peer: Peer) -> None:
        try:
            if isinstance(await self._handshake(peer), Agreement):
                await self._ask_drained(peer)
                if peer.held:  # another canary would only pin more rows
                    raise NotReady(f"{len(peer.held)} attempts may still write", stage="peer")
                await self.proving.first(peer)
                again = asyncio.create_task(self.proving.again(peer))
                try:
                    await self._watch(peer)
                finally:
                    again.cancel()
                    await asyncio.gather(again, return_exceptions=True)
        except LayoutRefused:
            pass  # the state says it
        except (SluiceError, TimeoutError) as error:
            self._set(peer, PeerState.LOST, str(error) or "handshake timed out")
            await self._release_if_gone(peer)

    async def _handshake(self, peer: Peer) -> Agreement | Refusal:
        answer = await peer.link.handshake(
            self._layout,
            self._epoch,
            self._endpoints,
            allow_missing_draft=self._allow_missing_draft,
            timeout_s=self._times.handshake_timeout_s,
        )
        if answer.epoch != peer.epoch:  # another life: nothing known of the last one holds
            peer.proven, peer.unproven, peer.canary = False, UNPROVEN, None
            peer.lost.set()
            await self._settle_older(peer, answer.epoch)
            peer.prefill = None
        peer.epoch = answer.epoch
        outcome = negotiate(
            answer.layout, self._layout, allow_missing_draft=self._allow_missing_draft
        )
        if isinstance(outcome, Refusal):
            peer.agreement = None
            # Once a reason: it is asked again every few seconds.
            if peer.reason != outcome.summary():
                self.on_refused(outcome)
            self._set(peer, PeerState.REFUSED, outcome.summary())
        elif outcome.digest != answer.agreement_digest:
            peer.agreement = None
            reason = (
                f"prefill agreed on {answer.agreement_digest or 'nothing'}, "
                f"this pod on {outcome.digest}: the two run different gates"
            )
            self._set(peer, PeerState.REFUSED, reason)
            raise LayoutRefused(reason, stage="handshake", remedy="run one version on both pods")
        else:
            peer.agreement = outcome
            if peer.lost.is_set():
                peer.lost = asyncio.Event()
            self._set(peer, PeerState.AGREED, "")
        return outcome

    async def _watch(self, peer: Peer) -> None:
        """Ping until something ends the pairing; raises ``PeerLost``. Returns when a new handshake is due."""
        missed, epoch = 0, peer.epoch
        while True:
            await asyncio.sleep(self._times.ping_every_s)
            try:
                answer = await peer.link.ping(self._epoch, self._times.ping_timeout_s)
            except SluiceError as error:
                missed += 1
                if missed >= self._times.missed_pings or await self._refused(peer.address):
                    raise PeerLost(f"no answer to {missed} pings: {error}", stage="peer") from error
                continue
            missed = 0
            self._heard(peer, answer)
            if answer.epoch != peer.epoch:
                self._set(peer, PeerState.LOST, "the prefill process restarted")
                return
            if not answer.paired:
                self._set(peer, PeerState.LOST, "prefill forgot this pod")
                return
            if peer.epoch != epoch or peer.state is not PeerState.AGREED:
                return  # somebody else shook hands with a new life of it
            await self._ask_drained(peer)
            if peer.forgettable:
                return

    def _heard(self, peer: Peer, answer: PingAnswer) -> None:
        before = peer.closing
        peer.prefill = answer.status
        if peer.closing != before:
            log.info(
                "peer", address=peer.address, closing=peer.closing, reason=peer.status().reason
            )
            self._change.set()

    def _set(self, peer: Peer, state: PeerState, reason: str) -> None:
        if (peer.state, peer.reason) != (state, reason):
            log.info("peer", address=peer.address, state=state.value, reason=reason)
        peer.state, peer.reason = state, reason
        if state is not PeerState.AGREED:
            peer.proven = False
            peer.lost.set()
        self._change.set()

    # -- quarantine -----------------------------------------------------------------------------------------

    def hold(self, peer: Peer, attempt_id: AttemptId, held: Held) -> None:
        """Keep a grant's rows out of use until its writer drained or is gone."""
        held.grant.apply(GrantEvent.LOST)
        self.quarantines += 1
        peer.held[attempt_id] = held
        log.warning("quarantined", attempt_id=attempt_id, peer=peer.address, epoch=held.epoch)
        self._change.set()

    def num_held(self) -> int:
        return sum(len(peer.held) for peer in self._peers.values())

    async def _ask_drained(self, peer: Peer) -> None:
        if not peer.held:
            return
        with contextlib.suppress(SluiceError):  # asked again with the next ping
            answer = await peer.link.drain(
                self._epoch, tuple(peer.held), self._times.ping_timeout_s
            )
            if answer.epoch == peer.epoch:
                for attempt_id in answer.drained:
                    await self._end_hold(peer, attempt_id, GrantEvent.DRAINED)

    async def _settle_older(self, peer: Peer, epoch: Epoch) -> None:
        """A new epoch answers at this address, so the process of an older one is gone."""
        for attempt_id, held in list(peer.held.items()):
            if held.epoch != epoch:
                await self._end_hold(peer, attempt_id, GrantEvent.GONE)

    async def _release_if_gone(self, peer: Peer) -> None:
        """Nobody listens at the address for a while: the process is gone.

        A prefill pod closes its port last, after its handles have settled, so a refused connection can't mean
        one that still writes; the wait lets bytes that already arrived in socket buffers be placed.
        """
        if not peer.held:
            return
        since = time.monotonic()
        while await self._refused(peer.address):
            if time.monotonic() - since >= self._times.gone_for_s:
                for attempt_id in list(peer.held):
                    await self._end_hold(peer, attempt_id, GrantEvent.GONE)
                return
            await asyncio.sleep(0.1)

    async def _end_hold(self, peer: Peer, attempt_id: AttemptId, event: GrantEvent) -> None:
        held = peer.held.get(attempt_id)
        if held is not None:
            if held.grant.can(event):
                held.grant.apply(event)
            await held.release()  # forgotten only when given back
            peer.held.pop(attempt_id, None)
            log.info("quarantine_ended", attempt_id=attempt_id, how=event.value)
            self._change.set()

    async def _refused(self, address: str) -> bool:
        """Nobody listens at the address: every one of its IP addresses refuses."""
        host, port = split_address(address)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._times.ping_timeout_s):
                places = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
                for *_, place in places:
                    with contextlib.suppress(ConnectionRefusedError):
                        _, writer = await asyncio.open_connection(str(place[0]), port)
                        writer.close()
                        return False
        except (OSError, TimeoutError):
            return False
        return True
