"""A rank of a pod that isn't its leader: follows the leader's turns, and moves its own part of the state.

It hears from nobody but the leader, over two pipes: turns (one way, for the step thread) and calls (answered
on the event loop). It ends with the leader: a closed pipe is the end, and the kernel ends it where it can't read.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import pickle
import signal
import threading
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path

from services.pod_settings import PodSettings
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady
from sluice.engine.ranks import follow
from sluice.errors import RankLost, SluiceError, as_sluice_error
from sluice.parallel.context import NO_CONTEXT, ContextParallel
from sluice.parallel.group import SINGLE, Parallel
from sluice.parallel.torch_group import TorchGroup, subgroup
from sluice.telemetry.logging import configure, get_logger
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.side import Chunk, Place, RankSide
from sluice.transfer.worker import TransferWorker
from sluice.types import AttemptId, Epoch, Role

log = get_logger(__name__)
_LOOK_EVERY_S = 0.5
_PR_SET_PDEATHSIG = 1  # prctl(2)


@dataclass(frozen=True)
class RankSpec:
    """What a rank process is started with."""

    settings: PodSettings
    role: Role
    place: Place
    epoch: Epoch
    meeting: Path
    timeout_s: float


@dataclass(frozen=True)
class Question:
    """A method of ``RankSide`` to call. ``number`` 0 wants no answer."""

    number: int
    method: str
    args: tuple[object, ...]


@dataclass(frozen=True)
class Answer:
    number: int
    value: object
    error: SluiceError | None = None


def device_of(device: str, rank: int) -> str:
    """Rank r's device: ``cuda`` stands for cuda:r."""
    return f"cuda:{rank}" if device == "cuda" else device


@dataclass(frozen=True)
class Groups:
    """A rank's ends of the collectives: of all ranks, and of those it shares a history with."""

    parallel: Parallel
    context: ContextParallel


ONE_RANK = Groups(SINGLE, NO_CONTEXT)


def join_groups(spec: RankSpec) -> Groups:
    """Meet the other ranks. Raises ``RankLost`` when they don't come."""
    place, settings = spec.place, spec.settings
    device = device_of(settings.device, place.rank)
    group = TorchGroup(
        spec.meeting, place.rank, place.size, device=device, timeout_s=spec.timeout_s
    )
    if settings.dcp == 1:
        return Groups(group, NO_CONTEXT)
    own = subgroup(group, settings.dcp, device=device, timeout_s=spec.timeout_s)
    return Groups(group, ContextParallel(own, settings.dcp_replicate_q_proj))


def run_rank(spec: RankSpec, turns: Connection, calls: Connection) -> None:
    """The process's main function."""
    end_with_leader()
    for number in (signal.SIGINT, signal.SIGTERM):  # for the leader, which then tells everybody
        signal.signal(number, signal.SIG_IGN)
    configure(f"{spec.role.value}-{spec.place.rank}", spec.settings.log_level)
    if spec.settings.device == "cpu":
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        core = _build(spec)
    except Exception as error:  # the leader says it to the world
        log.exception("rank_failed", rank=spec.place.rank)
        calls.send_bytes(pickle.dumps(Answer(0, None, as_sluice_error(error, stage="start"))))
        return
    asyncio.run(_serve(spec, core, turns, calls))


def end_with_leader() -> None:
    """Have the kernel kill this process when the leader's dies, frozen or busy as it may be: decode takes a
    refused connection to the leader for the end of all writes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _build(spec: RankSpec) -> EngineCore:
    settings = spec.settings
    pool = replace(settings.pool(), device=device_of(settings.device, spec.place.rank))
    groups = join_groups(spec)
    core = build_engine(
        settings.model_dir,
        spec.role,
        pool,
        settings.spec(),
        settings.engine(),
        dtype=settings.dtype,
        parallel=groups.parallel,
        context=groups.context,
    )
    gc.freeze()
    return core


async def _serve(spec: RankSpec, core: EngineCore, turns: Connection, calls: Connection) -> None:
    name = f"{spec.role.value}-{spec.epoch}-{spec.place.rank}"
    worker = TransferWorker(NixlPlane(name, initiator=spec.role is Role.PREFILL))
    arena, regions = core.memory.arena(), core.memory.regions()
    endpoint = await asyncio.to_thread(worker.start, arena, regions)
    side = RankSide(spec.place, core.memory, worker)
    thread = threading.Thread(
        target=_follow, args=(core, turns, side), name="engine-step", daemon=True
    )
    thread.start()
    calls.send_bytes(pickle.dumps(Answer(0, endpoint)))
    tasks: set[asyncio.Task[None]] = {asyncio.create_task(_watch(worker))}
    try:
        while True:
            said = await asyncio.to_thread(calls.recv_bytes)
            if not said:  # goodbye
                break
            question: Question = pickle.loads(said)
            task = asyncio.create_task(_answer(side, question, calls))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (EOFError, OSError):
        pass
    log.info("rank_ends", rank=spec.place.rank)
    await asyncio.to_thread(worker.close)


def _follow(core: EngineCore, turns: Connection, side: RankSide) -> None:
    """The step thread. Its death is the process's: the leader sees the pipes close."""

    def on_chunk(chunk: ChunkReady) -> None:
        what = Chunk(chunk.tables, chunk.start, chunk.stop, chunk.final)
        side.send(AttemptId(chunk.request_id), what, chunk.fence)

    try:
        follow(core, turns.recv_bytes, on_chunk)
    except RankLost as error:
        log.info("rank_lost", reason=str(error))
        os._exit(1)
    except BaseException:
        log.exception("rank_died")
        os._exit(1)


async def _watch(worker: TransferWorker) -> None:
    """The I/O thread's death is the process's, too: only so does the leader hear of it."""
    while worker.failed is None:  # noqa: ASYNC110  a thread's death has no event
        await asyncio.sleep(_LOOK_EVERY_S)
    log.critical("rank_died", reason=f"the I/O thread: {worker.failed!r}")
    os._exit(1)


async def _answer(side: RankSide, question: Question, calls: Connection) -> None:
    try:
        found = getattr(side, question.method)(*question.args)
        value = await found if asyncio.iscoroutine(found) else found
        answer = Answer(question.number, value)
    except Exception as error:
        answer = Answer(question.number, None, as_sluice_error(error, stage="transfer"))
    if question.number:
        calls.send_bytes(pickle.dumps(answer))
