"""One engine on several ranks: the leader says what to do between two steps, and every rank does the same.

Nothing of a plan is shipped. Scheduler, tables and page numbers depend on commands and on chosen tokens
alone, never on time or on a rank, and tokens are rank 0's (``Parallel.decide``); so ranks that are told
the same commands before the same step stay equal in everything but the numbers in their rows.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady
from sluice.engine.request import OnChunk
from sluice.errors import PoolError, RankLost, SluiceError
from sluice.grammar.matcher import Matcher
from sluice.types import Logprobs, Request, RequestId, Role


@dataclass(frozen=True)
class Call:
    """A command to ``EngineCore``, by its method's name."""

    method: str
    args: tuple[Any, ...]


@dataclass(frozen=True)
class Turn:
    """What happens before a step, and whether one follows: the last turn only stops."""

    calls: tuple[Call, ...]
    stop: bool = False

    def pack(self) -> bytes:
        return pickle.dumps(self)


class LeadingCore(EngineCore):
    """``EngineCore`` of rank 0. ``send`` gets every packed turn, in order, before its step."""

    send: Callable[[bytes], None]

    def lead(self, send: Callable[[bytes], None]) -> None:
        self.send = send
        self._calls: list[Call] = []

    def submit(
        self, request: Request, on_chunk: OnChunk | None = None, matcher: Matcher | None = None
    ) -> None:
        self._say("submit", request)
        super().submit(request, on_chunk, matcher)

    def adopt(
        self,
        request_id: RequestId,
        first_token: int,
        draft_valid: bool = True,
        first_logprobs: Logprobs | None = None,
    ) -> None:
        self._say("adopt", request_id, first_token, draft_valid, first_logprobs)
        super().adopt(request_id, first_token, draft_valid, first_logprobs)

    def abort(self, request_id: RequestId) -> None:
        self._say("abort", request_id)
        super().abort(request_id)

    def cancel(self, request_id: RequestId) -> None:
        self._say("cancel", request_id)  # whose abort is said once more, and finds nothing to do
        super().cancel(request_id)

    def release(self, request_id: RequestId) -> None:
        self._say("release", request_id)
        super().release(request_id)

    def quarantine(self, request_id: RequestId) -> None:
        self._say("quarantine", request_id)
        super().quarantine(request_id)

    def retract(self, request_id: RequestId) -> None:
        self._say("retract", request_id)
        super().retract(request_id)

    def shutdown(self, reason: SluiceError) -> None:
        self.send(Turn(self._taken(), stop=True).pack())
        super().shutdown(reason)

    def step(self) -> bool:
        self.send(Turn(self._taken()).pack())
        return super().step()

    def _say(self, method: str, *args: object) -> None:
        self._calls.append(Call(method, args))

    def _taken(self) -> tuple[Call, ...]:
        calls, self._calls = tuple(self._calls), []
        return calls


def follow(
    core: EngineCore, receive: Callable[[], bytes], on_chunk: Callable[[ChunkReady], None]
) -> None:
    """Do what the leader does, until it stops. ``on_chunk`` hears of every computed chunk (prefill role).

    A command that the leader's engine refused is refused here too, and that is all. Raises ``RankLost``
    when the leader is gone.
    """
    wants_chunks = core.role is Role.PREFILL
    while True:
        try:
            turn: Turn = pickle.loads(receive())
        except (EOFError, OSError) as error:
            raise RankLost("rank 0 is gone", stage="parallel") from error
        for call in turn.calls:
            extra = (on_chunk,) if call.method == "submit" and wants_chunks else ()
            try:
                getattr(core, call.method)(*call.args, *extra)
            except (PoolError, RankLost):
                raise
            except SluiceError:
                pass  # the leader answered for it
        if turn.stop:
            return
        core.step()
        core.drain()  # the leader's outputs are the ones that count
