"""Prompts on P ranks, answers on D: every pair of widths moves the state that one rank would have, and gives
its tokens. Ranks are threads, the data plane is the in-process one; digests are compared across the widths.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Prefilled, Reserved
from sluice.engine.ranks import LeadingCore
from sluice.layout.negotiate import Agreement, negotiate
from sluice.layout.reshard import grain_of
from sluice.layout.span import live_ordinals, span
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.pools.base import RequestTables
from sluice.transfer.loopback import LoopbackFabric, LoopbackPlane
from sluice.transfer.pieces import join_pieces
from sluice.transfer.plane import Endpoint
from sluice.transfer.side import Chunk, Meeting, Order, Place, Query, RankSide
from sluice.transfer.worker import TransferWorker
from sluice.types import AttemptId, Epoch, Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, run_all, tell
from tests.unit.parallel.ranks import run_contexts

MODELS = Path(__file__).parents[2] / "models"
POOL = PoolConfig(page_tokens=64, num_pages=16, num_window_pages=16, num_slots=6, fill="nan")
DSV4_POOL = PoolConfig(num_pages=8, num_window_pages=8, num_slots=6, fill="nan")
CONFIG = EngineConfig(max_batch_tokens=48)
EPOCH = Epoch("decode")
T = TypeVar("T")


def _requests() -> list[Request]:
    generator = torch.Generator().manual_seed(5)
    return [
        Request(
            RequestId(f"r{length}"),
            tuple(torch.randint(3, 500, (length,), generator=generator).tolist()),
            Sampling(max_tokens=8, temperature=0.8 * (length % 2), seed=length, ignore_eos=True),
        )
        for length in (1, 64, 65, 130)
    ]


@dataclass
class Pod:
    """Ranks of one role, their memory behind endpoints."""

    cores: list[EngineCore]
    workers: list[TransferWorker]
    sides: list[RankSide]
    endpoints: list[Endpoint]

    def each(self, work: Callable[[int], T]) -> list[T]:
        """``work`` of every rank, side by side: a step waits for the other ranks."""
        with ThreadPoolExecutor(len(self.cores)) as threads:
            return list(threads.map(work, range(len(self.cores))))

    def settle(self) -> list[list[object]]:
        """Step until there is nothing to do; every rank's outputs."""

        def run(rank: int) -> list[object]:
            core, outputs = self.cores[rank], []
            while core.step():
                outputs += core.drain()
            return outputs + core.drain()

        return self.each(run)

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def _pod(model: str, role: Role, size: int, fabric: LoopbackFabric, context: int = 1) -> Pod:
    pool = POOL if model == "tiny-kimi" else DSV4_POOL
    cores = run_contexts(
        size,
        context,
        lambda parallel, group: build_engine(
            MODELS / model,
            role,
            pool,
            None,
            CONFIG,
            parallel=parallel,
            context=ContextParallel(group) if context > 1 else NO_CONTEXT,
        ),
    )
    for core in cores:
        if isinstance(core, LeadingCore):
            core.lead(lambda _turn: None)
    workers = [
        TransferWorker(LoopbackPlane(fabric, f"{role.value}-{rank}")) for rank in range(size)
    ]
    endpoints = [
        worker.start(core.memory.arena(), core.memory.regions())
        for worker, core in zip(workers, cores, strict=True)
    ]
    sides = [
        RankSide(Place(rank, size), core.memory, worker)
        for rank, (core, worker) in enumerate(zip(cores, workers, strict=True))
    ]
    return Pod(cores, workers, sides, endpoints)


def _digest(
    pod: Pod, agreement: Agreement, tables: RequestTables, length: int, prefill: bool
) -> list[bytes]:
    """Each component's, over all ranks of a pod."""
    queries = []
    for plan in agreement.plans:
        component = plan.prefill if prefill else plan.decode
        runs = span(component, tables, length)
        first = live_ordinals(component, length).start
        queries.append(Query(plan.name, grain_of(plan), runs, first))
    held = [asyncio.run(side.digests(queries)) for side in pod.sides]
    return [
        join_pieces(query.grain, [pieces[index] for pieces in held])
        for index, query in enumerate(queries)
    ]


def _handed_over(model: str, prefill: Pod, decode: Pod) -> dict[RequestId, Story]:
    agreement = negotiate(prefill.cores[0].layout(), decode.cores[0].layout())
    assert isinstance(agreement, Agreement), agreement
    meeting = Meeting(EPOCH, agreement.plans, tuple(decode.endpoints))
    for side in prefill.sides:
        asyncio.run(side.connect(meeting))
    requests = _requests()
    for request in requests:
        for core in decode.cores:
            core.submit(request)
    reserved = decode.settle()[0]
    tables = {o.request_id: o.reservation.tables for o in reserved if isinstance(o, Reserved)}
    sources: dict[RequestId, RequestTables] = {}
    for request in requests:
        attempt = AttemptId(request.request_id)
        held, length = tables[request.request_id], len(request.prompt)
        grants = {plan.name: span(plan.decode, held, length) for plan in agreement.plans}
        order = Order(attempt, EPOCH, grants, length, 0, 20.0, frozenset(), False)
        for rank, side in enumerate(prefill.sides):
            side.begin(order)
            prefill.cores[rank].submit(request, _on_chunk(side, sources))
    first = {
        o.request_id: o.outcome.first_token for o in prefill.settle()[0] if isinstance(o, Prefilled)
    }
    stories: dict[RequestId, Story] = {}
    for request in requests:
        name, length = request.request_id, len(request.prompt)
        for side in prefill.sides:
            asyncio.run(side.finish(AttemptId(name)))
        sent = _digest(prefill, agreement, sources[name], length, True)
        assert sent == _digest(decode, agreement, tables[name], length, False)
        for core in decode.cores:
            core.adopt(name, first[name])
        for core in prefill.cores:
            core.release(name)
    tell(stories, decode.settle()[0])
    for core in (*prefill.cores, *decode.cores):
        assert core.memory.at_baseline()
    return stories


def _on_chunk(
    side: RankSide, sources: dict[RequestId, RequestTables]
) -> Callable[[ChunkReady], None]:
    def on_chunk(chunk: ChunkReady) -> None:
        sources[chunk.request_id] = chunk.tables
        what = Chunk(chunk.tables, chunk.start, chunk.stop, chunk.final)
        side.send(AttemptId(chunk.request_id), what, chunk.fence)

    return on_chunk


@pytest.fixture(scope="module", params=["tiny-kimi", "tiny-dsv4"])
def model(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(model: str) -> dict[RequestId, Story]:
    pool = POOL if model == "tiny-kimi" else DSV4_POOL
    core = build_engine(MODELS / model, Role.AGGREGATED, pool, None, CONFIG)
    return run_all(core, _requests())


@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (1, 4), (2, 4)])
def test_disaggregated_equals_aggregated(
    model: str, expected: dict[RequestId, Story], prefill: int, decode: int
) -> None:
    fabric = LoopbackFabric()
    pods = (
        _pod(model, Role.PREFILL, prefill, fabric),
        _pod(model, Role.DECODE, decode, fabric),
    )
    try:
        assert _handed_over(model, *pods) == expected
    finally:
        for pod in pods:
            pod.close()


@pytest.mark.parametrize(("prefill", "decode", "context"), [(1, 2, 2), (2, 4, 4), (1, 4, 2)])
def test_latents_are_dealt_on_the_way(prefill: int, decode: int, context: int) -> None:
    """1P -> 1D with decode context parallelism: every rank gets the tokens that it owns, the draft's keys
    go to all of them.
    """
    expected = run_all(
        build_engine(MODELS / "tiny-kimi", Role.AGGREGATED, POOL, None, CONFIG), _requests()
    )
    fabric = LoopbackFabric()
    pods = (
        _pod("tiny-kimi", Role.PREFILL, prefill, fabric),
        _pod("tiny-kimi", Role.DECODE, decode, fabric, context),
    )
    try:
        assert _handed_over("tiny-kimi", *pods) == expected
    finally:
        for pod in pods:
            pod.close()
