"""What callers hear when the step thread dies or hangs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from sluice.engine import facade as facade_module
from sluice.engine.core import EngineCore
from sluice.engine.facade import EngineFacade
from sluice.errors import (
    Aborted,
    DeadlineExceeded,
    InternalError,
    PoolError,
)
from sluice.types import RequestId, Role
from tests.unit.engine.facade_harness import SOON_S, Gate, read, running
from tests.unit.engine.toy_model import prompt_of, request, toy_core

pytestmark = pytest.mark.asyncio


def _break(core: EngineCore) -> None:
    """Make the next step end the thread: scheduling, unlike a forward, is not expected to raise."""

    def schedule() -> None:
        raise PoolError("books don't balance")

    core._scheduler.schedule = schedule  # type: ignore[method-assign, assignment]


@pytest.mark.parametrize("role", list(Role))
async def test_death_of_the_step_thread_fails_everything_and_hangs_nobody(role: Role) -> None:
    core = toy_core(role)
    facade = EngineFacade(core)
    await facade.start()
    assert facade.failed is None
    _break(core)
    one = request("r", prompt_of(9))
    calls: dict[Role, Callable[[], object]] = {
        Role.AGGREGATED: lambda: read(facade.generate(one)),
        Role.PREFILL: lambda: facade.prefill(one, lambda chunk: None),
        Role.DECODE: lambda: facade.reserve(one, SOON_S),
    }
    async with asyncio.timeout(SOON_S):
        with pytest.raises(InternalError, match="books don't balance"):
            await calls[role]()  # type: ignore[misc]
        assert isinstance(facade.failed, PoolError)
        for later in (facade.stats(), facade.abort(one.request_id), facade.release(one.request_id)):
            with pytest.raises(InternalError, match="books don't balance"):
                await later
        with pytest.raises(InternalError, match="books don't balance"):
            await read(facade.adopt(one.request_id, 1))
    await facade.stop()


async def test_broken_books_found_by_a_command_end_the_engine() -> None:
    """A refused command is its caller's business; a ``PoolError`` means nothing here can be
    trusted.
    """

    def find_broken_books(_: EngineCore) -> None:
        raise PoolError("a page has two owners")

    facade = EngineFacade(toy_core())
    await facade.start()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(InternalError, match="two owners"):
            await facade._call(find_broken_books)
        assert isinstance(facade.failed, PoolError)
    await facade.stop()


async def test_calls_made_while_the_dead_thread_still_counts_as_alive_do_not_hang() -> None:
    core = toy_core()
    _break(core)
    facade = EngineFacade(core)
    facade._thread.is_alive = lambda: True  # type: ignore[method-assign]
    await facade.start()
    await asyncio.to_thread(facade._thread.join, SOON_S)
    await asyncio.sleep(0.05)
    with pytest.raises(InternalError, match="books don't balance"):
        await asyncio.wait_for(facade.stats(), SOON_S)


async def test_a_hanging_step_is_reported_and_commands_still_run_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gate = Gate()
    async with running(toy_core(target=gate.target)) as facade:
        stream = facade.generate(request("r", prompt_of(3), max_tokens=900))
        await gate.reached()
        monkeypatch.setattr(facade_module, "COMMAND_WAIT_S", 0.05)
        with pytest.raises(DeadlineExceeded, match="has not answered"):
            await facade.abort(RequestId("r"))
        monkeypatch.undo()
        gate.open.set()
        assert (await facade.stats()).baseline
        with pytest.raises(Aborted):
            await read(stream)


async def test_a_reservation_made_after_its_caller_gave_up_on_a_hanging_engine_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    core = toy_core(Role.DECODE)
    hanging, go_on = threading.Event(), threading.Event()

    def hang(_: EngineCore) -> None:
        hanging.set()
        assert go_on.wait(30)

    async with running(core) as facade:
        facade._post_reply(hang)
        assert await asyncio.to_thread(hanging.wait, SOON_S)
        monkeypatch.setattr(facade_module, "COMMAND_WAIT_S", 0.05)
        with pytest.raises(DeadlineExceeded):
            await facade.reserve(request("r", prompt_of(9)), SOON_S)
        monkeypatch.undo()
        go_on.set()
        stats = await facade.stats()
        assert (stats.queued, stats.waiting, stats.baseline) == (0, 0, True)
