"""Five ways in which a pair stops moving state: readiness turns red with the reason, and green again by itself."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from sluice.cli.status import Status, read_status
from sluice.rpc.client import DecodeClient, PrefillClient
from tests.e2e.pods import Pair, Pod, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nixl,
    pytest.mark.asyncio,
    pytest.mark.timeout(180),
]

log = logging.getLogger(__name__)
PERIOD_S = 4.0
ALLOWANCE_S = 4.0  # what a canary itself may take on a busy machine
BACK_S = 40.0  # a pod's start is part of it
FLOOR_BYTES_S, SLOW_BYTES_S = 4e5, 1e5  # a loopback has a hundred times that
READINESS = ("sluice.v1.Decode", "sluice.layout")
DAMAGED = "draft.swa"
PASSED_AT = "sluice_decode_canary_passed_timestamp_seconds{%s}"


@dataclass(frozen=True)
class Stack:
    pair: Pair
    router: Pod

    async def seen(self) -> Status:
        """As ``sluice status`` shows it."""
        async with httpx.AsyncClient(
            base_url=f"http://{self.router.address}", trust_env=False, timeout=10
        ) as http:
            return await read_status(http)

    async def is_green(self) -> bool:
        ready = all(self.pair.decode.health(name) for name in READINESS)
        return ready and (await self.seen()).ready

    async def is_red(self) -> bool:
        return not any(self.pair.decode.health(name) for name in READINESS)

    async def complete(self) -> str:
        async with httpx.AsyncClient(
            base_url=f"http://{self.router.address}", trust_env=False, timeout=30
        ) as http:
            body = {"prompt": "And it came to pass", "max_tokens": 8, "temperature": 0}
            answer = await http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.json()["choices"][0]["text"])


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("canary")
    pair = Pair.create(
        folder,
        model_dir,
        {"UCX_TLS": "tcp"},  # as between containers
        metrics_listen="127.0.0.1:0",
        decode_canary_every_s=str(PERIOD_S),
        decode_canary_floor_bytes_s=str(FLOOR_BYTES_S),
    )
    settings = {"model_dir": str(model_dir), "decodes": pair.decode.address, "refresh_s": "0.2"}
    router = Pod("router", settings, folder / "router.log")
    pair.start()
    router.start()
    yield Stack(pair, router)
    router.kill()
    pair.kill()


@contextlib.asynccontextmanager
async def frozen(pair: Pair) -> AsyncIterator[None]:
    pair.prefill.freeze()
    try:
        yield
    finally:
        pair.prefill.thaw()


@contextlib.asynccontextmanager
async def killed(pair: Pair) -> AsyncIterator[None]:
    pair.prefill.kill()
    try:
        yield
    finally:
        pair.prefill.start()


@contextlib.asynccontextmanager
async def another_layout(pair: Pair) -> AsyncIterator[None]:
    """The clock starts when the new pod answers: until then it is a pod that went away."""
    before = pair.prefill.settings
    await _restarted(pair.prefill, {**before, "page_tokens": "256"})
    try:
        yield
    finally:
        await _restarted(pair.prefill, {**before})


async def _restarted(pod: Pod, settings: dict[str, str]) -> None:
    assert await asyncio.to_thread(pod.stop) == 0
    pod.settings = settings
    pod.start()
    async with PrefillClient(pod.address) as client:

        async def answers() -> bool:
            return (await client.get_status(1.0)).ready

        await eventually(answers, BACK_S, "the prefill pod answers")


@contextlib.asynccontextmanager
async def flipping(pair: Pair) -> AsyncIterator[None]:
    """A link that damages a byte of one component in every transfer."""
    order = pair.faults / f"flip.{DAMAGED}"

    async def again() -> None:
        while True:
            order.touch()
            await asyncio.sleep(0.01)

    task = asyncio.create_task(again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        order.unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def slow_link(pair: Pair) -> AsyncIterator[None]:
    order = pair.faults / "slow.link"
    new = order.with_suffix(".new")
    new.write_text(str(SLOW_BYTES_S))
    new.rename(order)
    try:
        yield
    finally:
        order.unlink()


@dataclass(frozen=True)
class Fault:
    """``says`` is in the reason; ``outcome`` is what its canaries are counted under, empty = it is no canary's."""

    strikes: Callable[[Pair], AbstractAsyncContextManager[None]]
    says: str
    outcome: str = ""


FAULTS = {
    "frozen": Fault(frozen, r"lost .*(no answer to \d pings|answered (UNAVAILABLE|DEADLINE))"),
    "killed": Fault(killed, r"lost .*(no answer to \d pings|answered UNAVAILABLE)"),
    "another layout": Fault(another_layout, r"refused (?=.*page)(?=.*128)(?=.*256)"),
    "a flipped byte": Fault(
        flipping,
        rf"canary.* failed: .*{re.escape(DAMAGED)}: sent [0-9a-f]+, received [0-9a-f]+",
        "DigestMismatch",
    ),
    "a slow link": Fault(
        slow_link,
        r"canary.* failed: .*target\.\S+: \d+ bytes at 0\.[01]\d* MB/s, the floor is 0\.4 MB/s",
        "TransferFailed",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_readiness_turns_red_with_the_reason_and_green_by_itself(
    stack: Stack, name: str
) -> None:
    pair, fault = stack.pair, FAULTS[name]
    await pair.ready()
    await eventually(stack.is_green, BACK_S, "ready before the fault")
    before, text = pair.decode.scrape(), await stack.complete()
    passed_at = PASSED_AT % pair.prefill.address
    async with DecodeClient(pair.decode.address) as client:

        async def says() -> bool:
            status = await client.get_status(2.0)
            return not status.ready and re.search(fault.says, status.reason) is not None

        async with fault.strikes(pair):
            began = time.monotonic()
            await eventually(stack.is_red, PERIOD_S + ALLOWANCE_S, "readiness red")
            await eventually(says, PERIOD_S + ALLOWANCE_S, f"a reason like {fault.says}")
            reason = (await client.get_status(2.0)).reason
            log.info("%s: red after %.1f s: %s", name, time.monotonic() - began, reason)
            assert pair.decode.health(), "liveness never depends on the peer"
            await eventually(lambda: _shown(stack, fault), 5, "the router shows it")
            red = pair.decode.scrape()
            assert red["sluice_pod_ready{decode}"] == 0
            assert red[passed_at] >= before[passed_at], "the last one that passed is still known"
            if fault.outcome:
                await eventually(lambda: _failed_twice(pair, before, fault.outcome), 10, "again")
                assert await stack.is_red(), "it stays red while the fault lasts"
        began = time.monotonic()
    await eventually(stack.is_green, BACK_S, "ready again")
    log.info("%s: green after %.1f s", name, time.monotonic() - began)
    assert await stack.complete() == text
    after = pair.decode.scrape()
    assert after["sluice_pod_ready{decode}"] == 1
    assert after[passed_at] > before[passed_at]
    await pair.baseline()


async def _shown(stack: Stack, fault: Fault) -> bool:
    """What ``sluice status`` and the page say: the pair is not used and why, and an alarm for a canary."""
    status = await stack.seen()
    (line,) = status.pairs
    told = re.search(fault.says, f"{line.state} {line.reason}") is not None
    alarmed = not fault.outcome or any(re.search(fault.says, a) for a in status.alarms)
    return not status.ready and not line.usable and told and alarmed


async def _failed_twice(pair: Pair, before: dict[str, float], outcome: str) -> bool:
    counter = f"sluice_decode_canary_runs_total{{{outcome}}}"
    return pair.decode.scrape()[counter] >= before.get(counter, 0) + 2
