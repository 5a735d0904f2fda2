"""The router's waiting queue: bounded, first come first served, each with a deadline and an honest Retry-After."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from sluice.errors import DeadlineExceeded, Overloaded, SluiceError

_MIN_RETRY_S, _MAX_RETRY_S = 1.0, 60.0
_SMOOTHING = 0.1  # weight of the newest request's duration


class Place(Protocol):
    """What a request waits for."""

    def close(self) -> None:
        """Give it back; idempotent."""
        ...


P = TypeVar("P", bound=Place)


@dataclass(eq=False)
class _Waiter(Generic[P]):
    take: Callable[[], P | None]
    place: asyncio.Future[P]


class Admission(Generic[P]):
    """Requests enter by taking a place: at once, or in turn when ``pump`` finds that one has become free.

    ``patience_s`` bounds the wait of one request, ``max_waiting`` the number of them.
    """

    def __init__(self, max_waiting: int, patience_s: float) -> None:
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._waiting: deque[_Waiter[P]] = deque()
        self._mean_s = 0.0  # how long a place is kept, smoothed
        self._taken = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    async def enter(self, take: Callable[[], P | None], deadline: float) -> P:
        """A place. Raises `Overloaded` when the queue is full or patience ends, `DeadlineExceeded` at
        ``deadline`` (event-loop time), and what ``fail`` was told."""
        place = None if self._waiting else self._take(take)
        return await self._wait(take, deadline) if place is None else place

    def left(self, kept_s: float) -> None:
        """A place that was kept this long has been given back."""
        self._taken -= 1
        self._mean_s += (kept_s - self._mean_s) * (_SMOOTHING if self._mean_s else 1.0)

    def pump(self) -> None:
        """Something changed: serve the head of the queue while there are places."""
        while self._waiting:
            waiter = self._waiting[0]
            if waiter.place.done():  # it gave up and hasn't been taken off yet
                self._waiting.popleft()
                continue
            place = self._take(waiter.take)
            if place is None:
                return
            self._waiting.popleft()
            waiter.place.set_result(place)

    def fail(self, error: Callable[[], SluiceError]) -> None:
        """Nobody who waits now will be served."""
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.place.done():
                waiter.place.set_exception(error())

    def retry_after_s(self) -> float:
        """When a newcomer may find a place: those ahead of it, at the pace at which places come free."""
        ahead = self.num_waiting + 1
        return min(_MAX_RETRY_S, max(_MIN_RETRY_S, ahead * self._mean_s / max(1, self._taken)))

    def _take(self, take: Callable[[], P | None]) -> P | None:
        place = take()
        self._taken += place is not None
        return place

    async def _wait(self, take: Callable[[], P | None], deadline: float) -> P:
        if len(self._waiting) >= self._max_waiting:
            raise self._overloaded(f"{len(self._waiting)} requests wait for a pair")
        loop = asyncio.get_running_loop()
        waiter = _Waiter(take, loop.create_future())
        self._waiting.append(waiter)
        patient_until = loop.time() + self._patience_s
        taken = False
        try:
            async with asyncio.timeout_at(min(deadline, patient_until)):
                place: P = await waiter.place
            taken = True
            return place
        except TimeoutError as error:
            if deadline <= patient_until:
                raise DeadlineExceeded(
                    "time was up while waiting for a pair", stage="queue"
                ) from error
            raise self._overloaded(f"no pair had room for {self._patience_s:g} s") from error
        finally:
            if not taken:
                self._give_up(waiter)

    def _give_up(self, waiter: _Waiter[P]) -> None:
        """Leaves nothing behind, also when the place came in the moment its waiter left."""
        if waiter in self._waiting:
            self._waiting.remove(waiter)
        if waiter.place.done() and not waiter.place.cancelled() and not waiter.place.exception():
            waiter.place.result().close()

    def _overloaded(self, what: str) -> Overloaded:
        return Overloaded(
            what,
            stage="queue",
            remedy="try again later, or add pods",
            retry_after_s=self.retry_after_s(),
        )
