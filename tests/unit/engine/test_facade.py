"""The asyncio side: streams, waits, cancellation, death of the step thread, idleness."""

from __future__ import annotations

import asyncio
import gc
import threading
import time

import psutil
import pytest

from sluice.config import EngineConfig
from sluice.engine.facade import ChunkReady, EngineFacade
from sluice.errors import (
    Aborted,
    BadRequest,
    ConfigError,
    DeadlineExceeded,
    IllegalTransition,
    Overloaded,
)
from sluice.types import FinishReason, RequestId, Role
from tests.unit.engine.driving import run_all
from tests.unit.engine.facade_harness import SOON_S, Gate, read, running, settled
from tests.unit.engine.toy_model import pool_config, prompt_of, request, toy_core

pytestmark = pytest.mark.asyncio


async def test_concurrent_streams_equal_the_core_alone() -> None:
    requests = [request(f"r{n}", prompt_of(n), seed=n, temperature=0.7) for n in (1, 5, 9, 20)]
    expected = {name: s.tokens for name, s in run_all(toy_core(), requests).items()}
    async with running(toy_core()) as facade:
        answers = await asyncio.gather(*(read(facade.generate(one)) for one in requests))
        assert {r.request_id: a for r, a in zip(requests, answers, strict=True)} == expected
        stats = await facade.stats()
        assert stats.baseline
        assert stats.steps > 0


async def test_refusals_come_out_of_the_stream() -> None:
    async with running(toy_core()) as facade:
        with pytest.raises(BadRequest, match="max_tokens is 0"):
            await read(facade.generate(request("r", prompt_of(3), max_tokens=0)))
        assert await read(facade.generate(request("r", prompt_of(3))))


async def test_closing_a_stream_aborts() -> None:
    async with running(toy_core()) as facade:
        stream = facade.generate(request("r", prompt_of(3), max_tokens=900))
        await anext(stream)
        await stream.aclose()
        await settled(facade)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)


async def test_dropping_a_stream_aborts() -> None:
    async with running(toy_core()) as facade:
        async for _ in facade.generate(request("r", prompt_of(3), max_tokens=900)):
            break
        gc.collect()
        await settled(facade)


async def test_abort_while_running_queued_and_unknown() -> None:
    core = toy_core(pool=pool_config(num_slots=1))
    async with running(core) as facade:
        active = facade.generate(request("running", prompt_of(3), max_tokens=900))
        queued = facade.generate(request("queued", prompt_of(3)))
        await anext(active)
        await facade.abort(RequestId("queued"))
        with pytest.raises(Aborted):
            await read(queued)
        assert (await facade.stats()).running == 1
        await facade.abort(RequestId("running"))
        assert (await facade.stats()).baseline
        with pytest.raises(Aborted):
            await read(active)
        await facade.abort(RequestId("nobody"))


async def test_prefill_calls_back_on_the_step_thread_and_holds_until_release() -> None:
    core = toy_core(Role.PREFILL, config=EngineConfig(max_batch_tokens=8))
    async with running(core) as facade:
        seen: list[tuple[str, ChunkReady]] = []
        one = request("r", prompt_of(20))
        outcome = await facade.prefill(
            one, lambda chunk: seen.append((threading.current_thread().name, chunk))
        )
        assert [(name, c.start, c.stop) for name, c in seen] == [
            ("engine-step", 0, 8),
            ("engine-step", 8, 16),
            ("engine-step", 16, 20),
        ]
        assert seen[-1][1].first_token == outcome.first_token
        assert not (await facade.stats()).baseline
        await facade.release(one.request_id)
        assert (await facade.stats()).baseline


async def test_cancelled_prefill_stops_computing_and_holds_until_release() -> None:
    gate = Gate()
    core = toy_core(Role.PREFILL, target=gate.target, config=EngineConfig(max_batch_tokens=8))
    async with running(core) as facade:
        task = asyncio.create_task(facade.prefill(request("r", prompt_of(40)), lambda chunk: None))
        await gate.reached()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        gate.open.set()
        stats = await facade.stats()
        assert (stats.running, stats.waiting, stats.steps) == (0, 1, 1)
        await facade.release(RequestId("r"))
        assert (await facade.stats()).baseline


async def test_release_of_a_computing_request_is_refused() -> None:
    gate = Gate()
    core = toy_core(Role.PREFILL, target=gate.target, config=EngineConfig(max_batch_tokens=8))
    async with running(core) as facade:
        task = asyncio.create_task(facade.prefill(request("r", prompt_of(40)), lambda chunk: None))
        await gate.reached()
        release = asyncio.create_task(facade.release(RequestId("r")))
        abort = asyncio.create_task(facade.abort(RequestId("r")))
        await asyncio.sleep(0)  # both commands wait behind the forward
        gate.open.set()
        with pytest.raises(IllegalTransition, match="abort it first"):
            await release
        await abort
        with pytest.raises(Aborted):
            await task


async def test_reserve_and_adopt() -> None:
    expected = run_all(toy_core(), [request("r", prompt_of(1))])[RequestId("r")].tokens
    async with running(toy_core(Role.DECODE)) as facade:
        one = request("r", prompt_of(9), max_tokens=1)
        reservation = await facade.reserve(one, timeout_s=SOON_S)
        assert reservation.request is one
        assert len(reservation.tables.pages) == 1
        stream = facade.adopt(one.request_id, 5)
        event = await anext(stream)
        assert (event.token_ids, event.finish_reason) == ((5,), FinishReason.LENGTH)
        assert [e async for e in stream] == []
        assert (await facade.stats()).baseline
        with pytest.raises(IllegalTransition, match="not here"):
            await read(facade.adopt(one.request_id, 5))
    assert expected


async def test_reserve_waits_for_capacity_first_come_first_served() -> None:
    core = toy_core(Role.DECODE, pool=pool_config(num_slots=1))
    async with running(core) as facade:
        await facade.reserve(request("a", prompt_of(9)), SOON_S)
        waiting = [
            asyncio.create_task(facade.reserve(request(name, prompt_of(9)), SOON_S))
            for name in ("b", "c")
        ]
        await asyncio.sleep(0.05)
        assert not any(task.done() for task in waiting)
        await facade.release(RequestId("a"))
        await asyncio.wait_for(waiting[0], SOON_S)
        assert not waiting[1].done()
        await facade.release(RequestId("b"))
        await asyncio.wait_for(waiting[1], SOON_S)
        await facade.release(RequestId("c"))
        assert (await facade.stats()).baseline


async def test_reserve_gives_up_at_its_deadline_and_when_cancelled() -> None:
    core = toy_core(Role.DECODE, pool=pool_config(num_slots=1))
    async with running(core) as facade:
        await facade.reserve(request("a", prompt_of(9)), SOON_S)
        with pytest.raises(DeadlineExceeded):
            await facade.reserve(request("late", prompt_of(9)), 0.05)
        task = asyncio.create_task(facade.reserve(request("gone", prompt_of(9)), SOON_S))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await facade.release(RequestId("a"))
        stats = await facade.stats()
        assert (stats.queued, stats.waiting, stats.baseline) == (0, 0, True)


async def test_a_reservation_granted_while_its_waiter_was_cancelled_is_given_back() -> None:
    async with running(toy_core(Role.DECODE)) as facade:
        for _ in range(20):
            task = asyncio.create_task(facade.reserve(request("r", prompt_of(9)), SOON_S))
            await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            if not task.cancelled():
                await facade.release(RequestId("r"))
            assert (await facade.stats()).baseline


async def test_abort_leaves_a_reservation_to_its_owner() -> None:
    async with running(toy_core(Role.DECODE)) as facade:
        await facade.reserve(request("r", prompt_of(9)), SOON_S)
        await facade.abort(RequestId("r"))
        assert (await facade.stats()).waiting == 1
        await facade.quarantine(RequestId("r"))
        with pytest.raises(IllegalTransition, match="quarantined -> running"):
            await read(facade.adopt(RequestId("r"), 1))
        await facade.release(RequestId("r"))
        assert (await facade.stats()).baseline


async def test_a_full_queue_refuses_reservations_at_once() -> None:
    core = toy_core(Role.DECODE, pool=pool_config(num_slots=1), config=EngineConfig(max_queue=1))
    async with running(core) as facade:
        await facade.reserve(request("a", prompt_of(9)), SOON_S)
        queued = asyncio.create_task(facade.reserve(request("b", prompt_of(9)), SOON_S))
        await asyncio.sleep(0.02)
        with pytest.raises(Overloaded):
            await facade.reserve(request("c", prompt_of(9)), SOON_S)
        queued.cancel()
        await asyncio.gather(queued, return_exceptions=True)
        await facade.release(RequestId("a"))


async def test_requests_of_another_role_are_refused() -> None:
    async with running(toy_core(Role.DECODE)) as facade:
        with pytest.raises(ConfigError, match="needs the aggregated role"):
            facade.generate(request("r", prompt_of(3)))
        with pytest.raises(ConfigError, match="prefill"):
            await facade.prefill(request("r", prompt_of(3)), lambda chunk: None)


async def test_stop_ends_what_is_computing_and_later_calls_are_told() -> None:
    facade = EngineFacade(toy_core())
    await facade.start()
    stream = facade.generate(request("r", prompt_of(3), max_tokens=900))
    await anext(stream)
    await facade.stop()
    await facade.stop()
    with pytest.raises(Aborted):
        await read(stream)
    with pytest.raises(Aborted, match="has stopped"):
        await facade.stats()
    assert facade.failed is None


async def test_an_idle_engine_uses_no_cpu() -> None:
    async with running(toy_core()) as facade:
        await read(facade.generate(request("r", prompt_of(3))))
        thread = next(t for t in threading.enumerate() if t.name == "engine-step")
        before = _cpu_s(thread.native_id)
        await asyncio.to_thread(time.sleep, 1.0)
        assert _cpu_s(thread.native_id) - before < 0.02


def _cpu_s(thread_id: int | None) -> float:
    times = {t.id: t.user_time + t.system_time for t in psutil.Process().threads()}
    assert thread_id is not None
    return times[thread_id]
