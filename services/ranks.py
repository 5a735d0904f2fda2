"""The rank processes of a pod as its leader sees them: started, told turns, asked things, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import pickle
import threading
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from services.pod_settings import PodSettings
from services.rank_process import (
    ONE_RANK,
    Answer,
    Groups,
    Question,
    RankSpec,
    join_groups,
    run_rank,
)
from sluice.errors import RankLost, SluiceError
from sluice.telemetry.logging import get_logger
from sluice.transfer.plane import Endpoint
from sluice.transfer.side import Place
from sluice.types import Epoch, Role

log = get_logger(__name__)
_COLLECTIVE_TIMEOUT_S = 60.0  # no rank is ever so much later than another; also bounds the start
_END_TIMEOUT_S = 5.0


class RankProcess:
    """One rank's process. ``tell`` is for the step thread, ``ask`` for the event loop."""

    def __init__(self, spec: RankSpec, on_lost: Callable[[RankLost], None]) -> None:
        context = multiprocessing.get_context("spawn")
        turns_in, self._turns = context.Pipe(duplex=False)
        calls_there, self._calls = context.Pipe(duplex=True)
        self.rank = spec.place.rank
        self._on_lost = on_lost
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._loop = asyncio.get_running_loop()
        self._lost: RankLost | None = None
        self._closing = False
        self._ready: asyncio.Future[Endpoint] = self._loop.create_future()
        self._process = context.Process(
            target=run_rank,
            args=(spec, turns_in, calls_there),
            name=f"sluice-rank-{self.rank}",
            daemon=True,
        )
        self._process.start()
        turns_in.close()  # so that a dead process shows as a closed pipe
        calls_there.close()
        self._reader = threading.Thread(
            target=self._read, args=(self._calls,), name=f"rank-{self.rank}", daemon=True
        )
        self._reader.start()

    async def ready(self) -> Endpoint:
        """Its model is loaded and its memory registered. Raises what it failed with."""
        return await self._ready

    def tell(self, turn: bytes) -> None:
        """Raises ``RankLost`` when the process is gone."""
        try:
            self._turns.send_bytes(turn)
        except OSError as error:
            raise self._gone() from error

    async def ask(self, method: str, *args: object) -> Any:
        """What ``RankSide.<method>(*args)`` gives there; raises what it raises, or ``RankLost``."""
        if self._lost is not None:
            raise self._lost
        number = next(self._numbers)
        answer = self._waiting[number] = self._loop.create_future()
        self.say(method, *args, number=number)
        return await answer

    def say(self, method: str, *args: object, number: int = 0) -> None:
        """The same without waiting for an answer. Keeps the order with ``ask``."""
        with contextlib.suppress(OSError):  # the reader finds out, and fails who waits
            self._calls.send_bytes(pickle.dumps(Question(number, method, args)))

    async def close(self) -> None:
        self._closing = True
        self._turns.close()
        # Shut down, not only closed: the reader thread holds the descriptor in its read.
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._calls.send_bytes(_GOODBYE)
        self._process.join(_END_TIMEOUT_S)
        if self._process.is_alive():
            log.warning("rank_killed", rank=self.rank)
            self._process.kill()
            self._process.join(_END_TIMEOUT_S)
        self._reader.join(_END_TIMEOUT_S)
        self._calls.close()
        self._process.close()

    def _read(self, calls: Connection) -> None:
        try:
            while True:
                answer: Answer = pickle.loads(calls.recv_bytes())
                self._to_loop(partial(self._take, answer))
        except (EOFError, OSError):
            self._to_loop(self._ended)

    def _to_loop(self, call: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call)

    def _take(self, answer: Answer) -> None:
        future: asyncio.Future[Any] | None = self._ready
        if answer.number:
            future = self._waiting.pop(answer.number, None)
        if future is None or future.done():
            return
        if answer.error is not None:
            future.set_exception(answer.error)
        else:
            future.set_result(answer.value)

    def _ended(self) -> None:
        self._lost = self._gone()
        for future in (self._ready, *self._waiting.values()):
            if not future.done():
                future.set_exception(self._lost)
                future.exception()  # seen: nobody may be waiting for it
        self._waiting.clear()
        if not self._closing:
            self._on_lost(self._lost)

    def _gone(self) -> RankLost:
        return RankLost(
            f"the process of rank {self.rank} is gone",
            stage="parallel",
            remedy="the pod restarts; look at the log of the rank for why it ended",
        )


_GOODBYE = b""


class RankGroup:
    """The leader's ranks 1 .. N-1 and its own end of their collectives. Empty for one rank."""

    def __init__(self, settings: PodSettings, role: Role, epoch: Epoch) -> None:
        self._settings = settings
        self._role = role
        self._epoch = epoch
        self._size = settings.tp
        self._meeting: int | None = None
        self.others: tuple[RankProcess, ...] = ()
        self.lost: RankLost | None = None
        self.on_lost: Callable[[RankLost], None] = lambda _error: None

    async def start(self) -> Groups:
        """Start the other ranks, if there are any, and meet them."""
        if self._size == 1:
            return ONE_RANK
        # In memory, where only this process's user can open it, and gone with it whatever it dies of.
        self._meeting = os.memfd_create("sluice-ranks")
        self.others = tuple(
            RankProcess(self._spec(rank), self._one_lost) for rank in range(1, self._size)
        )
        return await asyncio.to_thread(join_groups, self._spec(0))

    def tell(self, turn: bytes) -> None:
        for rank in self.others:
            rank.tell(turn)

    async def endpoints(self) -> tuple[Endpoint, ...]:
        """Of the other ranks, once all are ready."""
        return tuple(await asyncio.gather(*(rank.ready() for rank in self.others)))

    async def why(self, error: SluiceError) -> SluiceError:
        """The cause of a failed start: another rank's own error rather than what we saw of it."""
        for rank in self.others:
            with contextlib.suppress(TimeoutError):
                try:
                    await asyncio.wait_for(asyncio.shield(rank.ready()), 1.0)
                except RankLost:
                    continue
                except SluiceError as cause:
                    return cause
        return error

    async def close(self) -> None:
        await asyncio.gather(*(rank.close() for rank in self.others))
        if self._meeting is not None:
            os.close(self._meeting)
            self._meeting = None

    def _one_lost(self, error: RankLost) -> None:
        if self.lost is None:
            self.lost = error
            log.critical("rank_lost", error=str(error))
            self.on_lost(error)

    def _spec(self, rank: int) -> RankSpec:
        return RankSpec(
            settings=self._settings,
            role=self._role,
            place=Place(rank, self._size),
            epoch=self._epoch,
            meeting=Path(f"/proc/{os.getpid()}/fd/{self._meeting}"),
            timeout_s=_COLLECTIVE_TIMEOUT_S,
        )
