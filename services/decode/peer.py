"""What a decode pod knows of one prefill address: pairing, epoch, load, and what it may still write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from enum import Enum

from sluice.layout.negotiate import Agreement
from sluice.rpc.messages import CanaryStatus, PeerStatus, PrefillStatus
from sluice.rpc.prefill_link import PrefillLink
from sluice.transfer.grant import GrantEvent, GrantState, StateMachine
from sluice.types import AttemptId, Epoch

_NO_EPOCH = Epoch("")
DRAINING = "draining"  # an agreed peer that takes nothing new, in a status
LEAVING = "discovery says that it is being removed"
UNPROVEN = "its canary has not passed yet"


class PeerState(Enum):
    CONNECTING = "connecting"
    AGREED = "agreed"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True)
class PeerTimes:
    """How fast a peer's death shows. Two missed pings make a peer lost: about 2 s for one that hangs."""

    ping_every_s: float = 0.5
    ping_timeout_s: float = 1.0
    missed_pings: int = 2
    handshake_timeout_s: float = 15.0
    retry_s: float = 0.5
    refused_retry_s: float = 2.0  # somebody has to change a setting first
    # Refused connections this long: the process is gone, and so are its bytes in flight.
    gone_for_s: float = 1.0
    canary_every_s: float = 60.0  # each moves one short prompt's state
    canary_retry_s: float = 2.0  # after one that failed


@dataclass
class Held:
    """A grant whose writer has not been heard of: its rows stay out of use until it drained or is gone."""

    grant: StateMachine[GrantState, GrantEvent]
    epoch: Epoch
    release: Callable[[], Awaitable[None]]


@dataclass
class Peer:
    """One prefill address. ``lost`` is set when attempts on it can't succeed any more.

    ``leaving``: discovery says that it is being removed, or says nothing of it any more (``gone``). Nothing new
    goes to it; it is forgotten once gone and nobody needs the link.
    """

    address: str
    link: PrefillLink
    state: PeerState = PeerState.CONNECTING
    reason: str = "no handshake yet"
    epoch: Epoch = _NO_EPOCH
    agreement: Agreement | None = None
    held: dict[AttemptId, Held] = field(default_factory=dict)
    proven: bool = False  # its last canary passed, in this epoch
    unproven: str = UNPROVEN
    canary: CanaryStatus | None = None  # the last one
    canary_passed_unix_s: float = 0.0  # when one passed last, in any epoch; 0 = never
    served: int = 0  # requests whose state arrived from it, proven
    lost: asyncio.Event = field(default_factory=asyncio.Event)
    prefill: PrefillStatus | None = None  # as of its last ping
    leaving: bool = False
    gone: bool = False
    users: set[AttemptId] = field(default_factory=set)  # attempts that may still need the link

    @property
    def closing(self) -> bool:
        """It takes nothing new: by discovery's word or its own."""
        return self.leaving or (self.prefill is not None and not self.prefill.ready)

    @property
    def usable(self) -> bool:
        """It has agreed, its canary passed, and it isn't on its way out."""
        return self.state is PeerState.AGREED and self.proven and not self.closing

    @property
    def forgettable(self) -> bool:
        return self.gone and not self.held and not self.users

    def status(self) -> PeerStatus:
        state, reason = self.state.value, self.reason
        if self.state is PeerState.AGREED and not self.proven:
            state, reason = PeerState.CONNECTING.value, self.unproven
        elif self.state is PeerState.AGREED and self.closing:
            said = self.prefill.reason if self.prefill else ""
            state, reason = DRAINING, LEAVING if self.leaving else said
        return PeerStatus(
            address=self.address,
            epoch=self.epoch,
            state=state,
            reason=reason,
            agreement_digest=self.agreement.digest if self.agreement else "",
            quarantined_attempts=len(self.held),
            canary=self.canary,
            prefill=self.prefill,
        )
