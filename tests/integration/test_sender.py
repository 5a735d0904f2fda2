"""Chunks of a real prefill pushed through a real plane: every live row of every component arrives, byte for byte."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.facade import EngineFacade
from sluice.engine.outputs import ChunkReady
from sluice.errors import SpanMismatch
from sluice.layout.component import Owner
from sluice.layout.negotiate import Agreement, negotiate
from sluice.layout.span import Run, count_rows, span
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint
from sluice.transfer.sender import Route, Sender, SentComponent
from sluice.transfer.worker import TransferWorker
from sluice.types import Request, RequestId, Role, Sampling

MODEL_DIR = Path(__file__).parents[2] / "models" / "tiny-dsv4"
LENGTHS = [1, 3, 4, 8, 31, 32, 33, 127, 128, 129, 257, 300]
pytestmark = [pytest.mark.nixl, pytest.mark.asyncio]


@dataclass
class Side:
    core: EngineCore
    engine: EngineFacade
    worker: TransferWorker
    endpoint: Endpoint


@asynccontextmanager
async def side(role: Role, mode: PoolMode, steps: int, name: str) -> AsyncIterator[Side]:
    core = build_engine(
        MODEL_DIR,
        role,
        PoolConfig(mode=mode, num_pages=32, num_window_pages=16, num_slots=6, fill="nan"),
        SpecConfig(steps),
        EngineConfig(max_batch_tokens=50),
    )
    worker = TransferWorker(NixlPlane(name, initiator=role is Role.PREFILL))
    endpoint = await asyncio.to_thread(worker.start, core.memory.arena(), core.memory.regions())
    engine = EngineFacade(core)
    await engine.start()
    try:
        yield Side(core, engine, worker, endpoint)
    finally:
        await engine.stop()
        await asyncio.to_thread(worker.close)


def grants_of(
    decode: Side, agreement: Agreement, tables: object, length: int
) -> dict[str, tuple[Run, ...]]:
    return {
        name: span(decode.core.memory.component(name), tables, length)  # type: ignore[arg-type]
        for name in agreement.components
    }


def rows(core: EngineCore, name: str, runs: tuple[Run, ...]) -> list[torch.Tensor]:
    component = core.memory.component(name)
    picked = []
    for entry in component.entries:
        buffer = core.memory.buffer(name, entry.layer_id)
        picked += [buffer[run.first : run.first + run.count].clone() for run in runs]
    return [torch.cat([part.flatten() for part in picked])] if picked else []


# A decode pod that verifies 4 tokens keeps longer rings than a prefill pod that drafts 2: strides differ.
@pytest.mark.parametrize("prefill_steps", [3, 2], ids=["equal-rings", "unequal-rings"])
@pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
async def test_every_live_row_of_every_component_arrives(
    mode: PoolMode, prefill_steps: int
) -> None:
    name = f"{mode.value}-{prefill_steps}-{random.random()}"
    async with (
        side(Role.PREFILL, mode, prefill_steps, f"p-{name}") as prefill,
        side(Role.DECODE, mode, 3, f"d-{name}") as decode,
    ):
        agreement = negotiate(prefill.core.layout(), decode.core.layout())
        assert isinstance(agreement, Agreement)
        owners = [plan.prefill.owner for plan in agreement.plans]
        assert owners == sorted(owners, key=lambda owner: owner is Owner.DRAFT), "draft trails"
        assert agreement.components[-2:] == (
            "draft.swa" if mode is PoolMode.PAGED else "draft.swa_ring",
            "draft.hidden",
        )
        link = await asyncio.wrap_future(prefill.worker.connect(decode.endpoint))
        route = Route(link, agreement.plans, prefill.core.memory.regions(), decode.endpoint.regions)
        for length in LENGTHS:
            await push_and_compare(prefill, decode, agreement, route, length)
        sent = await push_and_compare(prefill, decode, agreement, route, LENGTHS[-1], measure=True)
        assert all(item.seconds > 0 for item in sent if item.num_bytes), "one by one, each timed"


async def push_and_compare(
    prefill: Side,
    decode: Side,
    agreement: Agreement,
    route: Route,
    length: int,
    *,
    measure: bool = False,
) -> tuple[SentComponent, ...]:
    prompt = tuple(random.Random(length).randrange(3, 500) for _ in range(length))
    request = Request(RequestId(f"r{length}"), prompt, Sampling(max_tokens=8))
    reservation = await decode.engine.reserve(request, 5.0)
    grants = grants_of(decode, agreement, reservation.tables, length)
    sender = Sender(prefill.worker, route, grants, length=length, deadline_s=20.0, measure=measure)
    chunks: list[ChunkReady] = []

    def on_chunk(chunk: ChunkReady) -> None:
        chunks.append(chunk)
        sender.send(chunk.tables, chunk.start, chunk.stop, chunk.final, chunk.fence)

    await prefill.engine.prefill(request, on_chunk)
    await sender.finish()
    for item in sender.sent():
        name = item.component.name
        source_runs = span(item.component, chunks[-1].tables, length)
        assert item.num_rows == count_rows(source_runs) == count_rows(grants[name])
        sent, got = rows(prefill.core, name, source_runs), rows(decode.core, name, grants[name])
        for source, received in zip(sent, got, strict=True):
            assert torch.equal(source, received), f"{name} of a {length}-token prompt"
            assert not received.isnan().any(), f"{name}: a row was never written"
    await prefill.engine.release(request.request_id)
    await decode.engine.release(request.request_id)
    return sender.sent()


async def test_a_grant_that_counts_other_rows_is_refused_before_anything_moves() -> None:
    async with (
        side(Role.PREFILL, PoolMode.PAGED, 3, f"p-{random.random()}") as prefill,
        side(Role.DECODE, PoolMode.PAGED, 3, f"d-{random.random()}") as decode,
    ):
        agreement = negotiate(prefill.core.layout(), decode.core.layout())
        assert isinstance(agreement, Agreement)
        link = await asyncio.wrap_future(prefill.worker.connect(decode.endpoint))
        route = Route(link, agreement.plans, prefill.core.memory.regions(), decode.endpoint.regions)
        request = Request(RequestId("r"), (5,) * 40, Sampling())
        reservation = await decode.engine.reserve(request, 5.0)
        grants = grants_of(decode, agreement, reservation.tables, 40)
        short = grants | {"target.c4": grants["target.c4"][:0]}
        with pytest.raises(SpanMismatch, match=r"target\.c4.*10 rows.*holds 0"):
            Sender(prefill.worker, route, short, length=40, deadline_s=5.0)
        unknown = {k: v for k, v in grants.items() if k != "draft.swa"}
        with pytest.raises(SpanMismatch, match="grant names"):
            Sender(prefill.worker, route, unknown, length=40, deadline_s=5.0)
        await decode.engine.release(request.request_id)
