"""Pods of several ranks over real NIXL: any pair of widths gives one process's tokens, and a dead rank shows."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from services.decode.settings import DecodeSettings
from services.pod import open_pod
from services.prefill.settings import PrefillSettings
from sluice.errors import ConfigError, SluiceError
from sluice.rpc.client import DecodeClient, PrefillClient
from sluice.rpc.messages import DecodeStatus
from sluice.transfer.faults import FaultPoint
from sluice.types import Role, Sampling
from tests.e2e.aggregated import Case, Outcome, run_aggregated
from tests.e2e.pods import Answer, Pair, Pod, eventually, generate
from tests.e2e.test_equality import run_disaggregated
from tests.integration.tiny_folders import SHIPPED, save_tiny

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]
CLIENT_HEARS_WITHIN_S = 2.0


@dataclass(frozen=True)
class Family:
    """A checkpoint, and prompts whose answers outgrow a decode pod that has room for little more than them."""

    name: str
    page_tokens: int
    lengths: tuple[int, ...]
    decodes: tuple[tuple[int, int], ...]  # ranks of decode, and of its context
    vocab: int = 500
    answer: int = 40

    def __str__(self) -> str:
        return self.name

    def cases(self) -> list[Case]:
        """Greedy and sampled in turn."""
        rng = random.Random(self.name)
        return [
            Case(
                tuple(rng.randrange(3, self.vocab) for _ in range(length)),
                Sampling(
                    max_tokens=self.answer,
                    temperature=0.8 * (index % 2),
                    seed=index,
                    ignore_eos=True,
                ),
            )
            for index, length in enumerate(self.lengths)
        ]

    def scarce_pages(self, context: int) -> int:
        """One more than the prompts need, in pages of ``context`` ranks together."""
        page = self.page_tokens * context
        return sum(-(-length // page) for length in self.lengths) + 1


# Page and chunk ends, a window, and prompts shorter than any of them.
_SHORT = (1, 5, 15, 16, 31, 33, 64, 70)
FAMILIES = (
    Family("tiny-kimi", 16, _SHORT, ((2, 1), (2, 2), (4, 2))),
    Family("tiny-dsv4", 128, (1, 63, 100, 120, 126, 127, 128, 129), ((1, 1), (2, 1), (4, 1))),
    Family("llama", 16, _SHORT, ((4, 1),), vocab=64),
    Family("qwen3", 16, _SHORT, ((4, 1),), vocab=64),
)
PREFILLS = (1, 2)


@dataclass(frozen=True)
class Prefills:
    """A family's prefill pods, one of each width, and what its cases give in one process."""

    family: Family
    folder: Path
    model: Path
    pods: tuple[Pod, ...]
    expected: list[Outcome]

    def settings(self, **own: str) -> dict[str, str]:
        return {
            "model_dir": str(self.model),
            "fault_dir": str(self.folder),
            "page_tokens": str(self.family.page_tokens),
            "debug_fill": "nan",
            "max_batch_tokens": "48",
            "num_pages": "80",
            "num_window_pages": "40",
            "num_slots": "20",
            **own,
        }

    def decode(self, width: int, context: int) -> Pod:
        """With too little memory for all answers, and a proof of every row that arrives."""
        settings = self.settings(
            tp=str(width),
            dcp=str(context),
            peers=",".join(pod.address for pod in self.pods),
            num_pages=str(self.family.scarce_pages(context)),
            promised_output="0.0",
            verify_digests="true",
        )
        return Pod("decode", settings, self.folder / f"decode-{width}-{context}.log")


@contextlib.contextmanager
def _prefills(family: Family, folder: Path) -> Iterator[Prefills]:
    model = save_tiny(family.name, folder / "model")
    fleet = Prefills(family, folder, model, (), [])
    pods = tuple(
        Pod("prefill", fleet.settings(tp=str(width)), folder / f"prefill-{width}.log")
        for width in PREFILLS
    )
    try:
        for pod in pods:
            pod.start()
        expected = asyncio.run(run_aggregated(model, family.cases(), max_batch_tokens=48))
        yield Prefills(family, folder, model, pods, expected)
        assert [pod.stop() for pod in pods] == [0] * len(pods)
    finally:
        for pod in pods:
            pod.kill()


async def _status(decode: Pod) -> DecodeStatus:
    async with DecodeClient(decode.address) as client:
        return await client.get_status(2.0)


async def _all_agreed(pairs: Sequence[Pair]) -> None:
    decode = pairs[0].decode

    async def look() -> bool:
        for pod in (decode, *(pair.prefill for pair in pairs)):
            assert pod.alive(), f"{pod.role} exited:\n{pod.log_tail()}"
        return all(peer.state == "agreed" for peer in (await _status(decode)).peers)

    await eventually(look, 120, "every prefill has agreed and is proven")


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_disaggregated_equals_aggregated_at_any_widths(tmp_path: Path, family: Family) -> None:
    """From prefill pods of one and of two ranks at once to decode pods of all widths, one after another."""
    with _prefills(family, tmp_path) as prefills:
        for width, context in family.decodes:
            decode = prefills.decode(width, context)
            decode.start()
            try:
                print(f"{family} to {width} ranks, context {context}")
                asyncio.run(_answers_and_aborts(prefills, decode))
                assert decode.stop() == 0
            finally:
                Pair(prefills.pods[0], decode, tmp_path).let_all_go()
                decode.kill()


async def _answers_and_aborts(prefills: Prefills, decode: Pod) -> None:
    """The canaries have proved every component first. Answers of both prefill pods outgrow the memory side by
    side. Then an abort of each in the middle of its transfer leaves all pods as they were.
    """
    pairs = [Pair(pod, decode, prefills.folder) for pod in prefills.pods]
    cases = prefills.family.cases()
    await _all_agreed(pairs)
    pairs[0].hold(FaultPoint.DECODE_ADOPTED)  # until they are, however quick the machine
    work = [asyncio.create_task(run_disaggregated(pair, cases)) for pair in pairs]
    await pairs[0].reached(FaultPoint.DECODE_ADOPTED)
    await _crowded(prefills, decode)
    pairs[0].let_all_go()
    for outcomes in await asyncio.gather(*work):
        for case, want, got in zip(cases, prefills.expected, outcomes, strict=True):
            assert got == want, f"prompt of {len(case.prompt)} tokens, {case.sampling}"
    assert (await _status(decode)).retractions > 0
    for pair in pairs:
        pair.hold(FaultPoint.PREFILL_POST)
        request = asyncio.create_task(generate(pair, cases[-1].prompt))
        await pair.reached(FaultPoint.PREFILL_POST)
        request.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await request
        pair.let_all_go()
        await pair.baseline()
    answer = await generate(pairs[-1], cases[-2].prompt, cases[-2].sampling)
    assert tuple(answer.token_ids) == prefills.expected[-2].token_ids


async def _crowded(prefills: Prefills, decode: Pod) -> None:
    """Some wait for memory, all others have their state, and nobody moves."""
    seen: object = None

    async def look() -> bool:
        nonlocal seen
        status = await _status(decode)
        on_their_way = 0
        for pod in prefills.pods:
            async with PrefillClient(pod.address) as client:
                on_their_way += (await client.get_status(2.0)).attempts
        before, seen = seen, (status.queued, [pool.free for pool in status.pools], on_their_way)
        return status.queued > 0 and on_their_way == 0 and before == seen

    await eventually(look, 40, "requests wait for memory", every_s=0.3)


def test_widths_that_mean_nothing_are_refused_at_the_start() -> None:
    """A context that doesn't divide the ranks, and a prefill pod that has one; families without latents are in
    ``tests/integration/test_context_parallel.py``, widths that don't divide each other in
    ``tests/unit/layout/test_reshard.py``.
    """
    model = SHIPPED / "tiny-kimi"
    with pytest.raises(ValidationError, match="dcp 2 does not divide tp 1"):
        DecodeSettings(model_dir=model, tp=1, dcp=2)

    async def opened() -> None:
        async with open_pod(PrefillSettings(model_dir=model, tp=2, dcp=2), Role.PREFILL):
            raise AssertionError("a prefill pod with a context started")

    with pytest.raises(ConfigError, match="a prefill pod can't deal its history to 2 ranks"):
        asyncio.run(opened())


def _pair(folder: Path, prefill: int, decode: int) -> Pair:
    return Pair.create(
        folder,
        SHIPPED / "tiny-kimi",
        prefill_tp=str(prefill),
        decode_tp=str(decode),
        debug_fill="nan",
        max_batch_tokens="64",
        num_pages="40",
        num_slots="10",
        decode_verify_digests="true",
    )


PROMPT = tuple(3 + i % 400 for i in range(200))


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
            PROMPT,
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
    pair = _pair(tmp_path, *((1, 2) if role == "decode" else (2, 1)))
    pod, other = (pair.decode, pair.prefill) if role == "decode" else (pair.prefill, pair.decode)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    pod.environment = {"TMPDIR": str(temporary)}

    async def run() -> None:
        await pair.ready(120)
        before = await generate(pair, PROMPT)
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
            after = await generate(pair, PROMPT)
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
