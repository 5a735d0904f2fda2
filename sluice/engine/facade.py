"""The engine as asyncio sees it: one step thread behind a queue, outputs by
``call_soon_threadsafe``.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from sluice.engine.core import EngineCore
from sluice.engine.outputs import (
    ChunkReady,
    EngineStats,
    Failed,
    Output,
    Prefilled,
    PrefillOutcome,
    Reservation,
    Reserved,
)
from sluice.engine.request import OnChunk
from sluice.engine.streams import TokenStream
from sluice.errors import (
    Aborted,
    ConfigError,
    DeadlineExceeded,
    InternalError,
    PoolError,
    RankLost,
    SluiceError,
)
from sluice.types import Logprobs, Request, RequestId, Role, TokenEvent

__all__ = [
    "ChunkReady",
    "EngineFacade",
    "EngineStats",
    "PrefillOutcome",
    "Reservation",
    "TokenStream",
]

log = logging.getLogger(__name__)
T = TypeVar("T")

IDLE_WAIT_S = 60.0  # an idle thread wakes this rarely; every command wakes it at once
COMMAND_WAIT_S = 60.0  # commands run between steps, and no step takes this long
STOP_WAIT_S = 30.0


@dataclass(frozen=True)
class _Command:
    """Something to do between two steps; ``done`` hears what came of it, if anybody waits."""

    run: Callable[[EngineCore], object]
    done: asyncio.Future[object] | None


class EngineFacade:
    """All methods are for the event loop that called ``start``; all memory operations happen on the
    step thread.

    If the step thread dies, ``failed`` is set, and every pending and later call raises
    ``InternalError``.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._commands: queue.SimpleQueue[_Command | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine-step", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Weak: a stream that its reader dropped must be collected, which aborts its request.
        self._streams: WeakValueDictionary[RequestId, TokenStream] = WeakValueDictionary()
        self._waiters: dict[RequestId, asyncio.Future[Reservation | PrefillOutcome]] = {}
        self._replies: set[asyncio.Future[object]] = set()
        self._ended = False  # set on the loop, after everything that was pending has been failed
        self.failed: Exception | None = None
        self._latest_stats = core.stats()

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the step thread after its current step. What is queued or computing fails with
        ``Aborted``.
        """
        if not self._thread.is_alive():
            return
        self._commands.put(None)
        await asyncio.to_thread(self._thread.join, STOP_WAIT_S)
        if self._thread.is_alive():
            raise InternalError(f"the step thread did not end within {STOP_WAIT_S} s")
        await asyncio.sleep(0)  # its last outputs are queued on this loop

    # ---- requests

    def generate(self, request: Request) -> TokenStream:
        """Aggregated: prompt to end. Closing the stream aborts. Errors come out of the stream."""
        self._require(Role.AGGREGATED)
        return self._stream(request.request_id, lambda core: core.submit(request))

    async def prefill(self, request: Request, on_chunk: OnChunk) -> PrefillOutcome:
        """Prefill role. ``on_chunk`` runs on the step thread after each chunk: read, enqueue, never
        block.

        State stays held until ``release()``, also when this raises or is cancelled (which aborts).
        """
        self._require(Role.PREFILL)
        outcome = await self._submit(request, on_chunk)
        assert isinstance(outcome, PrefillOutcome)
        return outcome

    async def reserve(self, request: Request, timeout_s: float) -> Reservation:
        """Decode role: wait, first come first served, until the whole prompt's items are mapped.

        Raises ``Overloaded`` at once when the queue is full, ``DeadlineExceeded`` after
        ``timeout_s``. Cancelling (or the deadline) leaves nothing reserved.
        """
        self._require(Role.DECODE)
        try:
            async with asyncio.timeout(timeout_s):
                reservation = await self._submit(request, None)
        except TimeoutError:
            raise DeadlineExceeded(
                f"no capacity within {timeout_s} s", stage="reserve", remedy="try another pod"
            ) from None
        assert isinstance(reservation, Reservation)
        return reservation

    def adopt(
        self,
        request_id: RequestId,
        first_token: int,
        draft_valid: bool = True,
        first_logprobs: Logprobs | None = None,
    ) -> TokenStream:
        """Decode role: a reservation's state has arrived. The first event is ``first_token``.

        Closing the stream aborts; items are given back at the end, whatever it is.
        """
        return self._stream(
            request_id,
            lambda core: core.adopt(request_id, first_token, draft_valid, first_logprobs),
        )

    async def abort(self, request_id: RequestId) -> None:
        """Returns when the request computes nothing any more; its stream or call then raises
        ``Aborted``.

        Prefill role and decode reservations: items stay held until ``release()``.
        """
        await self._call(lambda core: core.abort(request_id))

    async def release(self, request_id: RequestId) -> None:
        """Give back the items of a request that computes nothing. An unknown id was released
        before.
        """
        await self._call(lambda core: core.release(request_id))

    async def quarantine(self, request_id: RequestId) -> None:
        """Set a reservation's items apart while its peer may still write; ``release()`` ends it."""
        await self._call(lambda core: core.quarantine(request_id))

    async def retract(self, request_id: RequestId) -> None:
        """Take a running request off its memory now; it comes back as soon as it fits, before anybody
        new, and its stream doesn't notice.

        Raises ``IllegalTransition`` unless the request is running.
        """
        await self._call(lambda core: core.retract(request_id))

    def fail(self, error: RankLost) -> None:
        """From any thread: a rank is gone. The step thread dies of it, after the step that runs."""
        self._commands.put(_Command(lambda _: _raise(error), None))

    async def stats(self) -> EngineStats:
        """As of now: waits for the step that runs."""
        return await self._call(lambda core: core.stats())

    @property
    def latest_stats(self) -> EngineStats:
        """As of the end of the last step or command; never waits, so that a long step can't look like a dead pod."""
        return self._latest_stats

    # ---- event loop side

    def _require(self, role: Role) -> None:
        if self._core.role is not role:
            raise ConfigError(
                f"needs the {role.value} role, this engine is {self._core.role.value}"
            )

    def _stream(self, request_id: RequestId, command: Callable[[EngineCore], None]) -> TokenStream:
        stream = TokenStream(request_id, self._abandon)
        if request_id in self._streams:
            stream.fail(InternalError(f"request {request_id} has a stream already"))
            return stream
        self._streams[request_id] = stream
        self._post_reply(command).add_done_callback(lambda done: self._started(stream, done))
        return stream

    def _started(self, stream: TokenStream, done: asyncio.Future[object]) -> None:
        """A command that raised has no request behind it, so nothing else will end its stream."""
        if not done.cancelled() and (error := done.exception()) is not None:
            self._streams.pop(stream.request_id, None)
            stream.fail(error)

    def _abandon(self, request_id: RequestId) -> None:
        """A stream's reader went away."""
        self._streams.pop(request_id, None)
        self._commands.put(_Command(lambda core: core.abort(request_id), None))

    async def _submit(
        self, request: Request, on_chunk: OnChunk | None
    ) -> Reservation | PrefillOutcome:
        """Queue a request and wait for its outcome; its grammar holds up nobody else's steps."""
        matcher = None
        if (grammar := request.sampling.grammar) is not None:
            matcher = await asyncio.to_thread(self._core.grammars.matcher, grammar)
        request_id = request.request_id
        if request_id in self._waiters:
            raise InternalError(f"request {request_id} is being waited for already")
        waiter: asyncio.Future[Reservation | PrefillOutcome] = self._running_loop.create_future()
        self._waiters[request_id] = waiter
        try:
            await self._call(lambda core: core.submit(request, on_chunk, matcher))
            return await waiter
        except (asyncio.CancelledError, DeadlineExceeded):
            self._commands.put(_Command(lambda core: core.cancel(request_id), None))
            raise
        finally:
            self._waiters.pop(request_id, None)
            if waiter.done() and not waiter.cancelled():
                waiter.exception()  # seen: a failure may have reached the command's reply first

    async def _call(self, run: Callable[[EngineCore], T]) -> T:
        try:
            async with asyncio.timeout(COMMAND_WAIT_S):
                return cast(T, await self._post_reply(run))
        except TimeoutError:
            raise DeadlineExceeded(
                f"the step thread has not answered for {COMMAND_WAIT_S} s",
                stage="engine",
                remedy="a step hangs: look at the log's last step, then restart the pod",
            ) from None

    def _post_reply(self, run: Callable[[EngineCore], object]) -> asyncio.Future[object]:
        done: asyncio.Future[object] = self._running_loop.create_future()
        self._replies.add(done)
        done.add_done_callback(self._replies.discard)
        self._commands.put(_Command(run, done))
        if self._ended:  # nobody will read the queue; not is_alive(), which turns false too late
            _reject(done, self._dead())
        return done

    @property
    def _running_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise InternalError("the engine was not started")
        return self._loop

    def _dead(self) -> SluiceError:
        if self.failed is None:
            return Aborted("the engine has stopped")
        if isinstance(self.failed, RankLost):
            return self.failed
        error = InternalError(f"the step thread died: {self.failed!r}", stage="engine")
        error.__cause__ = self.failed
        return error

    def _deliver(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            match output:
                case TokenEvent():
                    self._deliver_tokens(output)
                case Reserved(request_id, reservation):
                    self._resolve(request_id, reservation)
                case Prefilled(request_id, outcome):
                    self._resolve(request_id, outcome)
                case Failed(request_id, error):
                    self._deliver_failure(request_id, error)

    def _deliver_tokens(self, event: TokenEvent) -> None:
        stream = self._streams.get(event.request_id)
        if stream is None:
            return
        if event.finish_reason is not None:
            del self._streams[event.request_id]
        stream.put(event)

    def _resolve(self, request_id: RequestId, result: Reservation | PrefillOutcome) -> None:
        waiter = self._waiters.get(request_id)
        if waiter is not None and not waiter.done():
            waiter.set_result(result)

    def _deliver_failure(self, request_id: RequestId, error: SluiceError) -> None:
        if (stream := self._streams.pop(request_id, None)) is not None:
            stream.fail(error)
        if (waiter := self._waiters.get(request_id)) is not None:
            _reject(waiter, error)

    def _fail_everything(self) -> None:
        self._ended = True
        for done in list(self._replies):
            _reject(done, self._dead())
        for waiter in list(self._waiters.values()):
            _reject(waiter, self._dead())
        for stream in list(self._streams.values()):
            stream.fail(self._dead())
        self._streams.clear()

    # ---- step thread side

    def _run(self) -> None:
        try:
            self._loop_steps()
        except BaseException as error:
            log.critical("the step thread died", exc_info=True)
            self.failed = error if isinstance(error, Exception) else InternalError(repr(error))
        finally:
            self._post_to_loop(self._fail_everything)

    def _loop_steps(self) -> None:
        worked = True
        while True:
            if not self._run_commands(wait=not worked):
                self._core.shutdown(Aborted("the engine is stopping", stage="shutdown"))
                self._publish()
                return
            worked = self._core.step()
            self._publish()

    def _run_commands(self, wait: bool) -> bool:
        """Run what is queued; with ``wait``, block for the first. False = stop."""
        try:
            command = (
                self._commands.get(timeout=IDLE_WAIT_S) if wait else self._commands.get_nowait()
            )
            while command is not None:
                self._run_command(command)
                command = self._commands.get_nowait()
        except queue.Empty:
            return True
        return False

    def _run_command(self, command: _Command) -> None:
        """A refused command is the caller's problem; broken books or a bug are everybody's."""
        result: object = None
        refused: SluiceError | None = None
        try:
            result = command.run(self._core)
        except (PoolError, RankLost):
            raise
        except SluiceError as error:
            refused = error
        self._publish()
        done = command.done
        if done is None:
            if refused is not None:
                log.error("a command failed: %s", refused)
        elif refused is not None:
            self._post_to_loop(lambda: _reject(done, refused))
        else:
            self._post_to_loop(lambda: _accept(done, result))

    def _publish(self) -> None:
        self._latest_stats = self._core.stats()
        outputs = self._core.drain()
        if outputs:
            self._post_to_loop(lambda: self._deliver(outputs))

    def _post_to_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:  # the loop is closed: nobody is left to hear it
            log.debug("an output came after the event loop was closed")


def _accept(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _reject(future: asyncio.Future[T], error: SluiceError) -> None:
    if not future.done():
        future.set_exception(error)


def _raise(error: Exception) -> None:
    raise error
