"""A pair's circuit breaker: after failures in a row no request goes there, then one at a time as a probe.

CLOSED --tripped--> OPEN --cooled--> HALF_OPEN --passed--> CLOSED
                     ^-------------failed---'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from sluice.errors import PeerLost, SluiceError, TransferFailed
from sluice.transfer.grant import StateMachine


class BreakerState(Enum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half-open"


class BreakerEvent(Enum):
    TRIPPED = "tripped"  # too many failures in a row
    COOLED = "cooled"  # time to try again
    PASSED = "passed"  # the probe was answered
    FAILED = "failed"  # the probe was not


BREAKER_TABLE: Mapping[tuple[BreakerState, BreakerEvent], BreakerState] = {
    (BreakerState.CLOSED, BreakerEvent.TRIPPED): BreakerState.OPEN,
    (BreakerState.OPEN, BreakerEvent.COOLED): BreakerState.HALF_OPEN,
    (BreakerState.HALF_OPEN, BreakerEvent.PASSED): BreakerState.CLOSED,
    (BreakerState.HALF_OPEN, BreakerEvent.FAILED): BreakerState.OPEN,
}


@dataclass(frozen=True)
class BreakerTimes:
    """The first pause is ``cool_s``; each failed probe doubles it, up to ``max_cool_s``."""

    failures: int = 3
    cool_s: float = 1.0
    max_cool_s: float = 30.0


def counts_against_pair(error: SluiceError) -> bool:
    """Whether a failure speaks of the pair.

    Not a client's own fault or deadline (clients choose it), not a full pod, not a refusal before any work.
    """
    return isinstance(error, PeerLost | TransferFailed) or error.http_status == 500


class Breaker:
    """Times are event-loop seconds, given by the caller. One probe at most is in flight while half-open."""

    def __init__(self, name: str, times: BreakerTimes) -> None:
        self._machine = StateMachine(f"breaker of {name}", BreakerState.CLOSED, BREAKER_TABLE)
        self._times = times
        self._failures = 0
        self._cool_s = times.cool_s
        self._opened_at = 0.0
        self._probing = False

    @property
    def state(self) -> BreakerState:
        return self._machine.state

    def opens_in_s(self, now: float) -> float:
        """Until it admits the next request, as far as time alone decides."""
        if self.state is not BreakerState.OPEN:
            return 0.0
        return max(0.0, self._opened_at + self._cool_s - now)

    def admits(self, now: float) -> bool:
        if self.state is BreakerState.OPEN:
            return self.opens_in_s(now) == 0.0
        return not self._probing

    def enter(self) -> bool:
        """A request goes there; only after ``admits``. True when it is the probe."""
        if self._machine.can(BreakerEvent.COOLED):
            self._machine.apply(BreakerEvent.COOLED)
        self._probing = self.state is BreakerState.HALF_OPEN
        return self._probing

    def leave(self, probe: bool) -> None:
        """The request is over, whatever became of it; a probe without a verdict leaves it half-open."""
        self._probing = self._probing and not probe

    def passed(self, probe: bool) -> None:
        """Answers of requests that began before it opened say nothing about now."""
        if probe and self._machine.can(BreakerEvent.PASSED):
            self._machine.apply(BreakerEvent.PASSED)
            self._cool_s = self._times.cool_s
        if self.state is BreakerState.CLOSED:
            self._failures = 0

    def failed(self, probe: bool, now: float) -> None:
        if probe and self._machine.can(BreakerEvent.FAILED):
            self._machine.apply(BreakerEvent.FAILED)
            self._cool_s = min(self._cool_s * 2, self._times.max_cool_s)
            self._opened_at = now
        elif self.state is BreakerState.CLOSED:
            self._failures += 1
            if self._failures >= self._times.failures:
                self._machine.apply(BreakerEvent.TRIPPED)
                self._failures = 0
                self._opened_at = now
