"""What a prefill and a decode pod are both made of: engine, memory, data plane, epoch; opened and closed in order."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from services.pod_settings import PodSettings
from services.ranks import RankGroup
from services.sides import Sides
from sluice.engine.build import build_engine
from sluice.engine.facade import EngineFacade
from sluice.engine.ranks import LeadingCore
from sluice.errors import ConfigError, SluiceError, as_sluice_error
from sluice.layout.encoding import fingerprint
from sluice.pools.base import StateMemory
from sluice.rpc.messages import PodLayout
from sluice.transfer.faults import FaultPoint, Faults
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint, Plane
from sluice.transfer.side import Place, RankSide
from sluice.transfer.slow_plane import SlowPlane
from sluice.transfer.worker import TransferWorker
from sluice.types import Epoch, Role

# Between health turning red and the exit: long enough for clients and the peer to hear why.
SHOW_DEATH_S = 2.0


@dataclass(frozen=True)
class Pod:
    """One life of one pod process."""

    info: PodLayout  # layout, epoch, fingerprint: what GetLayout answers
    engine: EngineFacade
    memory: StateMemory
    worker: TransferWorker
    endpoints: tuple[Endpoint, ...]  # by rank
    sides: Sides
    faults: Faults
    vocab_size: int

    @property
    def epoch(self) -> Epoch:
        return self.info.epoch

    @property
    def dead(self) -> BaseException | None:
        """What a thread of it died of: only a restart helps."""
        return self.engine.failed or self.worker.failed

    def require_alive(self) -> None:
        """Raises what it died of, if it did."""
        if self.dead is not None:
            raise as_sluice_error(self.dead, stage="pod")


@asynccontextmanager
async def open_pod(settings: PodSettings, role: Role) -> AsyncIterator[Pod]:
    """Load the model, register the memory, start the step and I/O threads; undo it all in reverse."""
    epoch = Epoch(uuid.uuid4().hex)
    ranks = RankGroup(settings, role, epoch)
    try:
        async with _opened(settings, role, epoch, ranks) as pod:
            yield pod
    finally:
        await ranks.close()


@asynccontextmanager
async def _opened(
    settings: PodSettings, role: Role, epoch: Epoch, ranks: RankGroup
) -> AsyncIterator[Pod]:
    try:
        if role is Role.PREFILL and settings.dcp > 1:
            raise ConfigError(
                f"a prefill pod can't deal its history to {settings.dcp} ranks",
                stage="start",
                remedy="set SLUICE_PREFILL_DCP=1; decode's may be what it likes",
            )
        groups = await ranks.start()
        core = await asyncio.to_thread(
            build_engine,
            settings.model_dir,
            role,
            settings.pool(),
            settings.spec(),
            settings.engine(),
            dtype=settings.dtype,
            parallel=groups.parallel,
            context=groups.context,
        )
        if isinstance(core, LeadingCore):
            core.lead(ranks.tell)
    except SluiceError as error:
        raise await ranks.why(error) from error
    # A full collection over torch's objects stops the step thread for 0.1 s; what is loaded now stays loaded.
    gc.freeze()
    faults = settings.faults()
    # The agent's name carries the epoch: NIXL never forgives a name that comes back with other memory.
    plane: Plane = NixlPlane(f"{role.value}-{epoch}-0", initiator=role is Role.PREFILL)
    if faults.directory is not None:  # tests only
        plane = SlowPlane(plane, faults.link_rate)
    worker = TransferWorker(
        plane,
        before_post=lambda _group: faults.reach_blocking(FaultPoint.PREFILL_POST),
    )
    engine = EngineFacade(core)
    ranks.on_lost = engine.fail
    own = await asyncio.to_thread(worker.start, core.memory.arena(), core.memory.regions())
    endpoints = (own, *await ranks.endpoints())
    await engine.start()
    layout = core.layout()
    try:
        yield Pod(
            PodLayout(layout, epoch, fingerprint(layout)),
            engine,
            core.memory,
            worker,
            endpoints,
            Sides(RankSide(Place(0, settings.tp), core.memory, worker), ranks.others),
            faults,
            core.info.vocab_size,
        )
    finally:
        await engine.stop()
        await asyncio.to_thread(worker.close)


def limit_torch_threads(device: str) -> None:
    """One torch thread a process on CPU unless told otherwise: two roles on two cores collapse with more."""
    if device == "cpu":
        import torch

        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@contextmanager
def stop_on_signals(stop: Callable[[], None]) -> Iterator[None]:
    """SIGTERM and SIGINT ask for a drain; a second one takes the default way out."""
    loop = asyncio.get_running_loop()
    signals = (signal.SIGTERM, signal.SIGINT)

    def once() -> None:
        for number in signals:
            loop.remove_signal_handler(number)
        stop()

    for number in signals:
        loop.add_signal_handler(number, once)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
