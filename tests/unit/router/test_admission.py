"""The waiting queue: order, bounds, deadlines, and nothing lost when somebody leaves."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from services.router.admission import Admission
from sluice.errors import DeadlineExceeded, NotReady, Overloaded

pytestmark = pytest.mark.asyncio


@dataclass
class Room:
    """``free`` places; each knows its way back."""

    free: int
    admission: Admission[Place]

    def take(self) -> Place | None:
        if self.free == 0:
            return None
        self.free -= 1
        return Place(self)


@dataclass
class Place:
    room: Room
    given_back: bool = field(default=False)

    def close(self) -> None:
        if not self.given_back:
            self.given_back = True
            self.room.free += 1
            self.room.admission.left(1.0)
            self.room.admission.pump()


def room(free: int = 1, max_waiting: int = 10, patience_s: float = 10.0) -> Room:
    return Room(free, Admission(max_waiting, patience_s))


def enter(place: Room, wait_s: float = 10.0) -> asyncio.Task[Place]:
    deadline = asyncio.get_running_loop().time() + wait_s
    return asyncio.create_task(place.admission.enter(place.take, deadline))


async def test_first_come_first_served_and_nobody_overtakes() -> None:
    hall, order = room(), []
    first = await enter(hall)

    async def visit(number: int) -> None:
        place = await enter(hall)
        order.append(number)
        place.close()

    visits = []
    for number in range(4):
        visits.append(asyncio.create_task(visit(number)))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert hall.admission.num_waiting == 4
    first.close()
    await asyncio.gather(*visits)
    assert order == [0, 1, 2, 3]
    assert (hall.free, hall.admission.num_waiting) == (1, 0)


async def test_a_full_queue_says_when_to_come_back() -> None:
    hall = room(free=2, max_waiting=3)
    held = [await enter(hall), await enter(hall)]
    waiting = [enter(hall) for _ in range(3)]
    await asyncio.sleep(0)
    hall.admission._mean_s = 10.0
    with pytest.raises(Overloaded) as caught:
        await enter(hall)
    # Four in line, two places, ten seconds each.
    assert caught.value.retry_after_s == pytest.approx(20.0)
    for place in held:
        place.close()
    for task in waiting:
        (await task).close()
    assert hall.free == 2


async def test_patience_and_deadline_end_a_wait() -> None:
    hall = room(free=0, patience_s=0.05)
    with pytest.raises(Overloaded, match=r"0\.05 s"):
        await enter(hall)
    with pytest.raises(DeadlineExceeded):
        await enter(hall, 0.01)
    assert hall.admission.num_waiting == 0


async def test_a_place_that_came_as_its_waiter_left_is_given_back() -> None:
    """The place is handed over and the client is gone before it wakes up: it leaked for ever."""
    hall = room()
    first = await enter(hall)
    waiting = enter(hall)
    await asyncio.sleep(0.01)
    first.close()  # hands the place to the waiter's future
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert hall.free == 1
    (await enter(hall)).close()


async def test_a_waiter_that_left_blocks_nobody() -> None:
    hall = room()
    first = await enter(hall)
    gone, next_one = enter(hall), enter(hall)
    await asyncio.sleep(0.01)
    gone.cancel()
    first.close()
    (await next_one).close()
    assert hall.free == 1


async def test_all_can_be_sent_home() -> None:
    hall = room(free=0)
    waiting = [enter(hall) for _ in range(3)]
    await asyncio.sleep(0.01)
    hall.admission.fail(lambda: NotReady("no pair"))
    for task in waiting:
        with pytest.raises(NotReady):
            await task
