"""Abort, kill and restart at every step of a request's life: typed errors in time, nothing lost, nothing leaked."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from sluice.errors import SluiceError
from sluice.transfer.faults import FaultPoint
from sluice.types import Sampling
from tests.e2e.pods import Answer, Pair, eventually, generate

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nixl,
    pytest.mark.asyncio,
    pytest.mark.timeout(300),
]

CLIENT_HEARS_WITHIN_S = 2.0
LONG_PROMPT = tuple(3 + i % 200 for i in range(600))  # five chunks of 128 tokens
LONG_ANSWER = Sampling(max_tokens=2000, ignore_eos=True)
HELD_POINTS = [point for point in FaultPoint if point is not FaultPoint.PREFILL_CHUNK]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Pair]:
    pair = Pair.create(
        tmp_path_factory.mktemp("pair"),
        model_dir,
        {"UCX_TLS": "tcp"},  # as between containers; CMA would copy into a stopped process
        max_batch_tokens="128",
        debug_fill="nan",
    )
    pair.start()
    yield pair
    pair.let_all_go()
    pair.kill()


@pytest_asyncio.fixture
async def pair(started: Pair) -> AsyncIterator[Pair]:
    """A pair that is whole before and after each test, whatever the test did to it."""
    started.let_all_go()
    for pod in (started.prefill, started.decode):
        if not pod.alive():
            pod.start()
    await started.ready()
    await started.baseline()
    yield started
    started.let_all_go()
    for pod in (started.prefill, started.decode):
        if pod.alive():
            pod.thaw()


async def expect(pair: Pair, before: Answer) -> None:
    """The next request gives what it always gave, and both pools come back to baseline."""
    await pair.ready()
    after = await generate(pair, LONG_PROMPT)
    assert after.token_ids == before.token_ids
    assert after.accepted == before.accepted
    await pair.baseline()


async def held_request(pair: Pair, point: FaultPoint) -> asyncio.Task[Answer]:
    """A request that stands at ``point``."""
    pair.hold(point)
    request = asyncio.create_task(generate(pair, LONG_PROMPT, LONG_ANSWER))
    await pair.reached(point)
    return request


async def decoding_request(pair: Pair) -> asyncio.Task[Answer]:
    """A request that has streamed a few tokens and has far to go."""
    streaming = asyncio.Event()

    def on_tokens(answer: Answer) -> None:
        if len(answer.token_ids) > 8:
            streaming.set()

    request = asyncio.create_task(generate(pair, LONG_PROMPT, LONG_ANSWER, on_tokens=on_tokens))
    async with asyncio.timeout(20):
        await streaming.wait()
    return request


async def request_at(pair: Pair, point: FaultPoint | None) -> asyncio.Task[Answer]:
    return await (decoding_request(pair) if point is None else held_request(pair, point))


async def typed_error(request: asyncio.Task[Answer]) -> SluiceError:
    """The error the client hears, in time."""
    began = time.monotonic()
    with pytest.raises(SluiceError) as caught:
        await asyncio.wait_for(request, 10)
    assert time.monotonic() - began < CLIENT_HEARS_WITHIN_S
    return caught.value


@pytest.mark.parametrize("point", [*FaultPoint, None], ids=str)
async def test_client_abort_leaves_nothing(pair: Pair, point: FaultPoint | None) -> None:
    before = await generate(pair, LONG_PROMPT)
    request = await request_at(pair, point)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    pair.let_all_go()
    await pair.baseline()
    await expect(pair, before)


@pytest.mark.parametrize("point", [*FaultPoint, None], ids=str)
async def test_killed_prefill_fails_the_request_and_frees_decode(
    pair: Pair, point: FaultPoint | None
) -> None:
    before = await generate(pair, LONG_PROMPT)
    request = await request_at(pair, point)
    pair.prefill.kill()
    pair.let_all_go()
    if point in (FaultPoint.DECODE_ADOPTED, None):  # decode has the state: it needs prefill no more
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
    else:
        await typed_error(request)
    await pair.decode_baseline()
    pair.prefill.start()
    await expect(pair, before)


@pytest.mark.parametrize("point", [*FaultPoint, None], ids=str)
async def test_killed_decode_fails_the_request_and_frees_prefill(
    pair: Pair, point: FaultPoint | None
) -> None:
    before = await generate(pair, LONG_PROMPT)
    request = await request_at(pair, point)
    pair.decode.kill()
    await typed_error(request)
    pair.let_all_go()
    await pair.prefill_baseline()
    pair.decode.start()
    await expect(pair, before)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_five_restarts_on_one_port_need_nothing_from_the_other_pod(
    pair: Pair, role: str
) -> None:
    before = await generate(pair, LONG_PROMPT)
    pod = pair.prefill if role == "prefill" else pair.decode
    other = pair.decode if role == "prefill" else pair.prefill
    untouched = other.pid
    for _ in range(5):
        pod.kill()
        pod.start()
        await expect(pair, before)
    assert other.pid == untouched


async def test_frozen_prefill_is_quarantined_then_drained(pair: Pair) -> None:
    """A peer that hangs may still write when it wakes: its rows stay out of use until it says it has stopped."""
    before = await generate(pair, LONG_PROMPT)
    request = await held_request(pair, FaultPoint.PREFILL_POST)
    pair.prefill.freeze()
    with pytest.raises(SluiceError):
        await asyncio.wait_for(request, 10)

    async def held() -> bool:
        return await pair.quarantined() > 0

    await eventually(held, 10, "rows quarantined")
    pair.let_all_go()
    await asyncio.sleep(1.0)
    assert await pair.quarantined() > 0, "nothing may be freed while the peer is silent"
    pair.prefill.thaw()
    await expect(pair, before)
    assert await pair.quarantined() == 0


async def test_frozen_decode_costs_prefill_only_the_rows_it_reads(pair: Pair) -> None:
    """The client hears at once; prefill keeps its source rows until the handles settle, then is clean."""
    before = await generate(pair, LONG_PROMPT)
    request = await held_request(pair, FaultPoint.PREFILL_POST)
    pair.decode.freeze()
    pair.let_all_go()
    await asyncio.sleep(0.5)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    pair.decode.thaw()
    await pair.baseline()
    await expect(pair, before)


async def test_writer_resumed_after_an_abort_changes_nobody_elses_state(pair: Pair) -> None:
    """Pause the writer in the middle of a transfer, abort, start others, resume: their answers are untouched."""
    before = await generate(pair, LONG_PROMPT)
    request = await held_request(pair, FaultPoint.PREFILL_POST)
    request.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await request
    # The I/O thread still stands before its post; new requests reserve rows while it does.
    others = [asyncio.create_task(generate(pair, LONG_PROMPT)) for _ in range(3)]
    await asyncio.sleep(0.3)
    pair.let_all_go()
    for answer in await asyncio.gather(*others):
        assert answer.token_ids == before.token_ids
    await expect(pair, before)


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_sigterm_finishes_what_runs_and_exits_clean(pair: Pair, role: str) -> None:
    before = await generate(pair, LONG_PROMPT)
    request = asyncio.create_task(generate(pair, LONG_PROMPT))
    await asyncio.sleep(0.05)
    pod = pair.prefill if role == "prefill" else pair.decode
    assert await asyncio.to_thread(pod.stop) == 0
    with contextlib.suppress(SluiceError):  # it may have come too late
        assert (await request).token_ids == before.token_ids
    pod.start()
    await expect(pair, before)
