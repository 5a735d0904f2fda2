"""The one thread that makes every data-plane call: posts in groups, polls, gives up in time, and settles."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from sluice.errors import InternalError, PeerLost, SluiceError, TransferFailed
from sluice.pools.base import Region
from sluice.transfer.lane import Lane, Posted
from sluice.transfer.plane import Endpoint, HandleState, Link, Movement, Plane, Polled
from sluice.transfer.staging import Staging, StagingUse, staging_slots, unpacked
from sluice.transfer.ticket import Settlement, StuckTicket, Ticket, TransferStats, running_future
from sluice.transfer.writes import GROUP_BYTES, count_bytes, group_writes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Settlement", "Ticket", "TransferStats", "TransferWorker", "WorkerConfig"]

T = TypeVar("T")

_SPIN_S = 200e-6  # small transfers finish within this; sleeping at once would cost them half a millisecond
_OPEN_TIMEOUT_S = 60.0  # a cold import of NIXL and UCX on a loaded machine


@dataclass(frozen=True)
class WorkerConfig:
    """``min_rate_bytes_s`` and ``grace_s`` give a group's deadline: what is ahead of it / rate + grace."""

    group_bytes: int = GROUP_BYTES  # also of a staging slot
    max_in_flight: int = 4  # groups per peer; more buys no throughput and lengthens a revocation
    min_rate_bytes_s: float = 20e6
    grace_s: float = 2.0


@dataclass(frozen=True)
class _Command:
    run: Callable[[], Any]
    future: Future[Any]


class TransferWorker:
    """Thread-safe front of a ``Plane``. Results come as ``concurrent.futures.Future`` (``asyncio.wrap_future``).

    While work is in flight the thread spins for 200 us, then sleeps ever longer; without work it blocks on its queue.
    If it dies, every future fails with ``InternalError`` and ``failed`` says why.
    ``before_post`` runs on the thread before each group (number within its ticket): a fault layer may block there.
    """

    def __init__(
        self,
        plane: Plane,
        config: WorkerConfig | None = None,
        *,
        before_post: Callable[[int], None] | None = None,
    ) -> None:
        self._plane = plane
        self._config = config or WorkerConfig()
        self._before_post = before_post
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._lanes: dict[int, Lane] = {}
        self._lock = threading.Lock()  # guards _accepting against commands that nobody would serve
        self._accepting = False
        self._staging: Staging | None = None
        self._first_lane = 0  # that posts first in a step
        self._close_deadline: float | None = None
        self._failed: BaseException | None = None
        self._last_progress = 0.0
        self._thread = threading.Thread(target=self._main, name="sluice-transfer", daemon=True)

    @property
    def failed(self) -> BaseException | None:
        """Why the I/O thread died; None while it works or after an orderly ``close``."""
        return self._failed

    def start(self, arena: Tensor, regions: Sequence[Region]) -> Endpoint:
        """Open the plane on the I/O thread. Blocks for about half a second (NIXL), at most a minute.

        An initiator also takes staging memory, as much as ``staging_slots`` says of the arena.
        """
        group_bytes = self._config.group_bytes
        slots = staging_slots(arena.numel(), group_bytes) if self._plane.initiator else 0
        self._staging = Staging(arena, group_bytes, slots)
        staging = self._staging.memory if slots else None
        self._accepting = True
        self._thread.start()
        opened = self._enqueue(lambda: self._plane.open(arena, regions, staging))
        try:
            return opened.result(timeout=_OPEN_TIMEOUT_S)
        except BaseException:
            self.close(timeout_s=1.0)
            raise

    def connect(self, peer: Endpoint) -> Future[Link]:
        return self._enqueue(lambda: self._connect(peer))

    def disconnect(self, link: Link, *, peer_gone: bool = False) -> Future[None]:
        """Forget a peer. Fails with ``InternalError`` while its tickets are unsettled, unless the peer is gone.

        ``peer_gone`` is the caller's word that the peer's process is dead (a new epoch at its address): then what is
        posted can't land anywhere any more, and its tickets settle. Idempotent.
        """
        return self._enqueue(lambda: self._disconnect(link, peer_gone))

    def transports(self) -> Future[tuple[str, ...]]:
        """See ``Plane.transports``."""
        return self._enqueue(self._plane.transports)

    def submit(
        self,
        link: Link,
        moves: Sequence[Movement],
        fence: Callable[[], None] | None,
        deadline_s: float,
    ) -> Ticket:
        """Send ``moves`` to a peer, after ``fence``. Never blocks and never raises; the ticket carries errors.

        The fence runs on the I/O thread, so while it waits for a device, other tickets wait too.
        """
        ticket = Ticket(link, fence, deadline_s, wake=self._wake)
        accepted = self._enqueue(lambda: self._accept(ticket, tuple(moves)))
        accepted.add_done_callback(lambda done: _pass_on(done, ticket))
        return ticket

    def stuck(self) -> tuple[StuckTicket, ...]:
        """Tickets that failed for their caller while groups of them may still land at the peer."""
        lanes = list(
            self._lanes.values()
        )  # a snapshot: the I/O thread replaces, it never shares halves
        found = [ticket.stuck() for lane in lanes for ticket in list(lane.tickets)]
        return tuple(ticket for ticket in found if ticket is not None)

    def staging(self) -> StagingUse:
        """Which staging slots are in use; none on a side that only receives."""
        return StagingUse(0, 0, 0) if self._staging is None else self._staging.use()

    def close(self, timeout_s: float = 5.0) -> None:
        """Revoke everything, wait for posted groups to settle, close the plane. Blocks; idempotent."""
        with self._lock:
            first, self._accepting = self._accepting, False
            if first:
                self._close_deadline = time.monotonic() + timeout_s
                self._commands.put(_nothing())
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_s + 5.0)

    def _enqueue(self, run: Callable[[], T]) -> Future[T]:
        future: Future[T] = running_future()
        with self._lock:
            if self._accepting:
                self._commands.put(_Command(run, future))
                return future
        future.set_exception(self._not_working())
        return future

    def _wake(self) -> None:
        self._commands.put(_nothing())

    def _not_working(self) -> InternalError:
        reason = f"died: {self._failed!r}" if self._failed else "is closed"
        return InternalError(f"the transfer thread {reason}", stage="transfer")

    # The I/O thread.

    def _main(self) -> None:
        try:
            while not self._may_stop():
                self._serve_commands()
                if self._step():
                    self._last_progress = time.monotonic()
            self._plane.close()
        except BaseException as error:
            self._failed = error
        finally:
            self._abandon_everything()

    def _may_stop(self) -> bool:
        if self._close_deadline is None:
            return False
        for lane in self._lanes.values():
            for ticket in lane.tickets:
                ticket.revoke()
        idle = not any(lane.busy for lane in self._lanes.values())
        return (idle and self._commands.empty()) or time.monotonic() > self._close_deadline

    def _serve_commands(self) -> None:
        command = self._next_command()
        while command is not None:
            try:
                command.future.set_result(command.run())
            except Exception as error:
                command.future.set_exception(error)
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return

    def _next_command(self) -> _Command | None:
        """Wait for a command: for ever without work, hardly at all just after progress."""
        closing = self._close_deadline is not None
        if not closing and not any(lane.busy for lane in self._lanes.values()):
            return self._commands.get()
        try:
            delay = self._pause(time.monotonic() - self._last_progress)
            return self._commands.get(timeout=delay) if delay else self._commands.get_nowait()
        except queue.Empty:
            return None

    @staticmethod
    def _pause(quiet_s: float) -> float:
        """Seconds to sleep when nothing moved for ``quiet_s``: a stuck peer must not cost a core."""
        if quiet_s < _SPIN_S:
            return 0.0
        if quiet_s < 5e-3:
            return 50e-6
        return 200e-6 if quiet_s < 1.0 else 5e-3

    def _step(self) -> bool:
        """Poll and post once for each peer; True when anything moved."""
        moved = False
        lanes = list(self._lanes.values())
        for lane in lanes:
            moved |= self._poll_lane(lane)
            self._expire(lane)
        first = self._first_lane % max(1, len(lanes))
        for lane in lanes[first:] + lanes[:first]:
            moved |= self._post_one(lane)
            lane.tickets = [ticket for ticket in lane.tickets if not ticket.advance()]
        return moved

    def _poll_lane(self, lane: Lane) -> bool:
        waiting: list[Posted] = []
        for posted in lane.in_flight:
            polled = self._plane.poll(posted.handle)
            if polled.state is HandleState.POSTED:
                waiting.append(posted)
                continue
            self._plane.release(posted.handle)
            self._give_back(posted.slot)
            posted.ticket.group_settled(posted.num_bytes, _error_of(polled))
        moved = len(waiting) < len(lane.in_flight)
        lane.in_flight = waiting
        return moved

    def _expire(self, lane: Lane) -> None:
        now = time.monotonic()
        name = lane.link.endpoint.agent_name
        for posted in lane.in_flight:
            if now > posted.deadline and not posted.expired:
                posted.expired = True
                if self._staging is not None and posted.slot is not None:
                    self._staging.quarantine(posted.slot)
                posted.ticket.fail(
                    TransferFailed(
                        f"{posted.num_bytes} bytes to {name} did not arrive in time",
                        stage="transfer",
                        remedy="the peer is stuck or the network is; its rows stay reserved",
                    )
                )
        for ticket in lane.tickets:
            if now > ticket.deadline and not ticket.future.done():
                ticket.fail(
                    TransferFailed(
                        f"transfer to {name} not done within {ticket.deadline_s:.1f} s; "
                        f"{len(lane.in_flight)} groups are unsettled there",
                        stage="transfer",
                    )
                )

    def _post_one(self, lane: Lane) -> bool:
        if len(lane.in_flight) >= self._config.max_in_flight:
            return False
        ticket = lane.next_ticket()
        if ticket is None:
            return False
        if ticket.next_is_packed and self._must_wait_for_slot():
            self._first_lane += 1  # another lane is first next time, or one would get every slot
            return False
        try:
            ticket.pass_fence()
            if self._before_post is not None:
                self._before_post(ticket.group_number)
        except Exception as error:
            ticket.fail(_as_typed(error))
            return True
        if ticket.wants_post:  # it may have been revoked meanwhile
            self._post(lane, ticket)
        return True

    def _post(self, lane: Lane, ticket: Ticket) -> None:
        packed, group = ticket.next_is_packed, ticket.take_group()
        num_bytes = count_bytes(group)
        ahead = num_bytes + sum(posted.num_bytes for posted in lane.in_flight)
        allowed_s = ahead / self._config.min_rate_bytes_s + self._config.grace_s
        deadline = time.monotonic() + allowed_s
        staging, slot = self._staging, None
        assert staging is not None, "work comes after start"
        try:
            slot = staging.take() if packed else None
            writes = unpacked(group) if slot is None else staging.gather(slot, group)
            handle = self._plane.post(lane.link, writes)
        except SluiceError as error:
            self._give_back(slot)
            ticket.fail(error)
            return
        ticket.group_posted(num_bytes)
        lane.in_flight.append(Posted(handle, ticket, num_bytes, deadline, slot))

    def _must_wait_for_slot(self) -> bool:
        """Slots come back when groups settle. Those of stuck peers may not: then rows leave one by one."""
        staging = self._staging
        return staging is not None and not staging.has_free and not staging.all_quarantined

    def _give_back(self, slot: int | None) -> None:
        if self._staging is not None and slot is not None:
            self._staging.give(slot)

    def _connect(self, peer: Endpoint) -> Link:
        link = self._plane.connect(peer)
        self._lanes[id(link)] = Lane(link)
        return link

    def _disconnect(self, link: Link, peer_gone: bool) -> None:
        lane = self._lanes.get(id(link))
        if lane is None:
            return
        name = link.endpoint.agent_name
        if lane.busy and not (peer_gone or link.lost):
            raise InternalError(
                f"{len(lane.tickets)} tickets to {name} are unsettled",
                stage="disconnect",
                remedy="revoke them and await settled, or say that the peer is gone",
            )
        for ticket in lane.tickets:
            ticket.fail(PeerLost(f"peer {name} is gone", stage="transfer"))
        self._plane.disconnect(link)
        self._poll_lane(lane)
        assert not lane.in_flight, "a disconnected plane reports no handle as posted"
        for ticket in lane.tickets:
            ticket.advance()
        del self._lanes[id(link)]

    def _accept(self, ticket: Ticket, moves: tuple[Movement, ...]) -> None:
        lane = self._lanes.get(id(ticket.link))
        if lane is None:
            name = ticket.link.endpoint.agent_name
            raise TransferFailed(f"no connection to {name}", stage="transfer", remedy="reconnect")
        ticket.load(group_writes(moves, self._config.group_bytes))
        self._last_progress = time.monotonic()
        lane.tickets.append(ticket)

    def _abandon_everything(self) -> None:
        with self._lock:
            self._accepting = False
        for lane in self._lanes.values():
            for ticket in lane.tickets:
                ticket.abandon(self._not_working())
        while True:
            try:
                command = self._commands.get_nowait()
            except queue.Empty:
                return
            command.future.set_exception(self._not_working())


def _nothing() -> _Command:
    return _Command(lambda: None, running_future())


def _pass_on(accepted: Future[None], ticket: Ticket) -> None:
    """A ticket that was never accepted posted nothing: it fails and is settled at once."""
    error = accepted.exception()
    if error is not None:
        ticket.abandon(_as_typed(error))


def _as_typed(error: BaseException) -> SluiceError:
    if isinstance(error, SluiceError):
        return error
    return InternalError(f"{type(error).__name__}: {error}", stage="transfer")


def _error_of(polled: Polled) -> SluiceError | None:
    if polled.state is HandleState.DONE:
        return None
    failure = PeerLost if polled.peer_lost else TransferFailed
    return failure(polled.error, stage="transfer")
