"""Pods of several ranks over real NIXL: any pair of widths gives one process's tokens, and a dead rank shows."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import psutil
import pytest

from sluice.errors import SluiceError
from sluice.rpc.client import DecodeClient, PrefillClient
from sluice.transfer.faults import FaultPoint
from sluice.types import Sampling
from tests.e2e.aggregated import Case, run_aggregated
from tests.e2e.pods import Answer, Pair, Pod, eventually, generate
from tests.e2e.test_equality import run_disaggregated

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]
CLIENT_HEARS_WITHIN_S = 2.0
MODELS = Path(__file__).parents[2] / "models"
# Page and chunk ends, a window, and prompts shorter than any of them.
LENGTHS = (1, 5, 63, 64, 65, 129, 200)
WIDTHS = [
    ("tiny-kimi", 2, 2, 2),
    ("tiny-dsv4", 2, 1, 1),
]  # ranks of prefill, of decode, its context's


def _cases() -> list[Case]:
    """Greedy and sampled, some again with a longer answer."""
    rng = random.Random(11)
    return [
        Case(
            tuple(rng.randrange(3, 500) for _ in range(length)),
            Sampling(
                max_tokens=4 + 2 * index,
                temperature=0.8 * (index % 2),
                seed=index,
                ignore_eos=True,
            ),
        )
        for index, length in enumerate(LENGTHS)
    ]


def _pair(folder: Path, model: str, prefill: int, decode: int, context: int) -> Pair:
    return Pair.create(
        folder,
        MODELS / model,
        prefill_tp=str(prefill),
        decode_tp=str(decode),
        decode_dcp=str(context),
        debug_fill="nan",
        max_batch_tokens="64",
        num_pages="40",
        num_window_pages="40",
        num_slots="10",
        decode_promised_output="0.2",
        decode_verify_digests="true",
    )


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "context"),
    WIDTHS,
    ids=[f"{m}-{p}-{d}x{c}" for m, p, d, c in WIDTHS],
)
def test_disaggregated_equals_aggregated_at_any_widths(
    tmp_path: Path, model: str, prefill: int, decode: int, context: int
) -> None:
    """The canary proves every component first, digest by digest, across the widths. An abort in the middle
    leaves both pods as they were.
    """
    pair = _pair(tmp_path, model, prefill, decode, context)

    async def run() -> None:
        await pair.ready(120)
        outcomes = await run_disaggregated(pair, _cases())
        assert outcomes == await run_aggregated(MODELS / model, _cases(), max_batch_tokens=64)
        pair.hold(FaultPoint.PREFILL_CHUNK)
        task = asyncio.create_task(generate(pair, _cases()[-1].prompt))
        await pair.reached(FaultPoint.PREFILL_CHUNK)
        task.cancel()
        pair.let_all_go()
        await pair.baseline()

    try:
        pair.start()
        asyncio.run(run())
        assert [pod.stop() for pod in (pair.decode, pair.prefill)] == [0, 0]
    finally:
        pair.kill()


def _ranks_of(pod: Pod) -> list[psutil.Process]:
    """Its rank processes but the leader: its children, but for multiprocessing's own helper."""
    return [
        child
        for child in psutil.Process(pod.pid).children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]


async def _standing_request(pair: Pair, point: FaultPoint | None) -> asyncio.Task[Answer]:
    """A request at ``point``, or (None) one that streams and has far to go."""
    started = asyncio.Event()
    if point is not None:
        pair.hold(point)
    task = asyncio.create_task(
        generate(
            pair,
            _cases()[-1].prompt,
            Sampling(max_tokens=3000, ignore_eos=True),
            on_tokens=lambda _: started.set(),
        )
    )
    if point is None:
        async with asyncio.timeout(20):
            await started.wait()
    else:
        await pair.reached(point)
    return task


async def _red(pod: Pod) -> None:
    client = DecodeClient if pod.role == "decode" else PrefillClient
    async with client(pod.address) as asked:

        async def look() -> bool:
            return not (await asked.get_status(2.0)).ready

        await eventually(look, 5.0, "readiness is red", every_s=0.02)


async def _exited(pod: Pod) -> int:
    assert pod.process is not None
    return await asyncio.to_thread(pod.process.wait, 30)


@pytest.mark.parametrize(
    ("role", "points"),
    [("decode", [None, FaultPoint.PREFILL_POST]), ("prefill", [FaultPoint.PREFILL_POST])],
    ids=["decode", "prefill"],
)
def test_a_dead_rank_fails_its_pod_fast_and_nobody_else(
    tmp_path: Path, role: str, points: list[FaultPoint | None]
) -> None:
    """While it answers, and in the middle of a transfer. The leader exits, so that it is started again; then
    everything is as before. Whatever a leader dies of, its ranks go with it, and no file stays.
    """
    pair = _pair(tmp_path, "tiny-kimi", *((1, 2, 1) if role == "decode" else (2, 1, 1)))
    pod, other = (pair.decode, pair.prefill) if role == "decode" else (pair.prefill, pair.decode)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    pod.environment = {"TMPDIR": str(temporary)}

    async def run() -> None:
        await pair.ready(120)
        before = await generate(pair, _cases()[-1].prompt)
        for point in points:
            request = await _standing_request(pair, point)
            (rank,) = _ranks_of(pod)
            rank.kill()
            pair.let_all_go()
            killed = time.monotonic()
            with pytest.raises(SluiceError) as caught:
                await asyncio.wait_for(request, CLIENT_HEARS_WITHIN_S)
            assert caught.value.retryable, caught.value
            print(f"{role} {point}: {caught.value.code} after {time.monotonic() - killed:.2f} s")
            await _red(pod)
            assert await _exited(pod) != 0
            assert "rank 1 is gone" in pod.log_tail()
            assert other.alive()
            await (pair.prefill_baseline() if role == "decode" else pair.decode_baseline())
            pod.start()
            await pair.ready(120)
            after = await generate(pair, _cases()[-1].prompt)
            assert (after.token_ids, after.accepted) == (before.token_ids, before.accepted)
            await pair.baseline()
            assert await pair.quarantined() == 0
        (rank,) = _ranks_of(pod)
        rank.suspend()
        pod.kill()
        assert psutil.wait_procs([rank], 10)[1] == []
        assert list(temporary.iterdir()) == []

    try:
        pair.start()
        asyncio.run(run())
    finally:
        pair.kill()
