"""Pods of several ranks over real NIXL: any pair of widths gives one process's tokens, and a dead rank shows."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import psutil
import pytest

from sluice.errors import SluiceError
from sluice.rpc.client import DecodeClient
from sluice.transfer.faults import FaultPoint
from sluice.types import Sampling
from tests.e2e.aggregated import Case, run_aggregated
from tests.e2e.pods import Answer, Pair, Pod, eventually, generate
from tests.e2e.test_equality import run_disaggregated

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]
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
        {"TMPDIR": str(folder)},  # a killed leader can't take its ranks' meeting place away
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


def _rank_of(pod: Pod) -> psutil.Process:
    """A rank process that isn't the leader: its child, but for multiprocessing's own helper."""
    (rank,) = [
        child
        for child in psutil.Process(pod.pid).children()
        if "resource_tracker" not in " ".join(child.cmdline())
    ]
    return rank


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_a_dead_rank_fails_its_pod_fast_and_nobody_else(tmp_path: Path, role: str) -> None:
    pair = _pair(tmp_path, "tiny-kimi", *((1, 2, 1) if role == "decode" else (2, 1, 1)))
    pod, other = (pair.decode, pair.prefill) if role == "decode" else (pair.prefill, pair.decode)

    async def run() -> None:
        await pair.ready(120)
        point = FaultPoint.PREFILL_CHUNK
        if role == "prefill":
            pair.hold(point)
        started = asyncio.Event()

        def on_tokens(_: Answer) -> None:
            started.set()

        sampling = Sampling(max_tokens=400, ignore_eos=True)
        task = asyncio.create_task(
            generate(pair, _cases()[-1].prompt, sampling, on_tokens=on_tokens)
        )
        await (started.wait() if role == "decode" else pair.reached(point))
        _rank_of(pod).kill()
        killed = time.monotonic()
        pair.let_all_go()
        with pytest.raises(SluiceError) as caught:
            await task
        print(f"{role}: {caught.value.code} after {time.monotonic() - killed:.2f} s")

        async with DecodeClient(pair.decode.address) as client:

            async def red() -> bool:
                return not (await client.get_status(2.0)).ready

            await eventually(red, 5.0, "readiness is red")
        assert other.alive()
        pod.kill()
        pod.start()
        await pair.ready(120)
        assert len((await generate(pair, (5, 6, 7))).token_ids) == 16
        await pair.baseline()

    try:
        pair.start()
        asyncio.run(run())
    finally:
        pair.kill()
