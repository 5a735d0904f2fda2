"""One submitted transfer as its caller sees it: a result, a way to revoke, and the moment nothing writes any more."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from sluice.errors import Aborted, SluiceError
from sluice.transfer.plane import Link, Movement, Pack


@dataclass(frozen=True)
class TransferStats:
    """What a ticket moved, from its first post to the peer's last acknowledgement."""

    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Settlement:
    """Nothing of the ticket will be written any more. ``clean``: every posted group is known to have arrived.

    Unclean means that the peer vanished or refused: what of the posted groups landed there is unknown.
    """

    clean: bool
    error: str = ""


@dataclass(frozen=True)
class StuckTicket:
    """A ticket whose caller was told it failed, while groups of it may still land at the peer."""

    agent_name: str
    num_groups: int
    num_bytes: int
    age_s: float  # since the caller was told


class Ticket:
    """``future`` ends first (result or typed error); ``settled`` ends when no handle is posted any more.

    ``future`` resolves to ``TransferStats`` once every byte is visible at the peer; it fails with ``PeerLost``,
    ``TransferFailed`` or ``Aborted`` as soon as that can't happen. ``settled`` resolves to a ``Settlement``, stays
    pending while a stuck peer may still receive, and fails only if the worker itself died or closed: then nothing is
    known, and the rows must not be reused. Cancelling either future has no effect; ``revoke`` is the way.
    """

    def __init__(
        self,
        link: Link,
        fence: Callable[[], None] | None,
        deadline_s: float,
        wake: Callable[[], None],
    ) -> None:
        self.future: Future[TransferStats] = running_future()
        self.settled: Future[Settlement] = running_future()
        self.link = link
        self.deadline = time.monotonic() + deadline_s
        self.deadline_s = deadline_s
        self._fence = fence
        self._wake = wake
        self._revoked = False
        self._groups: deque[tuple[Movement, ...]] = deque()
        self._next_group = 0
        self._in_flight = 0
        self._in_flight_bytes = 0
        self._done_bytes = 0
        self._started: float | None = None
        self._failed_at: float | None = None
        self._unclean = ""

    def revoke(self) -> None:
        """Post nothing more. Thread-safe and immediate: no group is started after this returns.

        A group that is being posted right now finishes; ``settled`` says when.
        """
        self._revoked = True
        self._wake()

    # What follows is called by the worker's I/O thread only.

    def load(self, groups: tuple[tuple[Movement, ...], ...]) -> None:
        self._groups.extend(groups)

    @property
    def wants_post(self) -> bool:
        return bool(self._groups) and not self._revoked

    @property
    def next_is_packed(self) -> bool:
        """Whether the group that is posted next has rows to gather."""
        return bool(self._groups) and any(isinstance(move, Pack) for move in self._groups[0])

    @property
    def is_settled(self) -> bool:
        return self.settled.done()

    @property
    def group_number(self) -> int:
        """Number of the group that is posted next, from 0."""
        return self._next_group

    def pass_fence(self) -> None:
        """Run the caller's fence, once: device work that fills the source rows must be finished before the copy."""
        fence, self._fence = self._fence, None
        if fence is not None:
            fence()

    def take_group(self) -> tuple[Movement, ...]:
        self._next_group += 1
        if self._started is None:
            self._started = time.monotonic()
        return self._groups.popleft()

    def group_posted(self, num_bytes: int) -> None:
        self._in_flight += 1
        self._in_flight_bytes += num_bytes

    def group_settled(self, num_bytes: int, error: SluiceError | None) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= num_bytes
        if error is None:
            self._done_bytes += num_bytes
        else:
            self._unclean = error.message
            self.fail(error)

    def fail(self, error: SluiceError) -> None:
        """Tell the caller; what is posted stays tracked, because nothing can take it back."""
        self._groups.clear()
        if not self.future.done():
            self._failed_at = time.monotonic()
            self.future.set_exception(error)

    def advance(self) -> bool:
        """Resolve what can be resolved; True when the ticket needs no more attention."""
        if self._revoked and not self.future.done() and (self._groups or self._in_flight):
            self.fail(Aborted("the transfer was revoked", stage="transfer"))
        if self._in_flight or self._groups:
            return False
        if not self.future.done():
            seconds = 0.0 if self._started is None else time.monotonic() - self._started
            self.future.set_result(TransferStats(self._done_bytes, seconds))
        if not self.settled.done():
            self.settled.set_result(Settlement(clean=not self._unclean, error=self._unclean))
        return True

    def abandon(self, error: SluiceError) -> None:
        """The worker stops watching: the outcome of what is posted will never be known."""
        self.fail(error)
        if not self.settled.done():
            if self._in_flight:
                self.settled.set_exception(error)
            else:
                self.settled.set_result(Settlement(clean=not self._unclean, error=self._unclean))

    def stuck(self) -> StuckTicket | None:
        if self._failed_at is None or not self._in_flight:
            return None
        return StuckTicket(
            self.link.endpoint.agent_name,
            self._in_flight,
            self._in_flight_bytes,
            time.monotonic() - self._failed_at,
        )


def running_future() -> Future[Any]:
    """A future that can't be cancelled from outside (asyncio cancels what it wraps)."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future
