"""One engine on several ranks: the leader says what to do between two steps, and every rank does the same.

Nothing of a plan is shipped. Scheduler, tables and page numbers depend on commands and on chosen tokens
alone, never on time or on a rank, and tokens are rank 0's (``Parallel.decide``); so ranks that are told
the same commands before the same step stay equal in everything but the numbers in their rows.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec

from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady
from sluice.engine.request import OnChunk
from sluice.errors import PoolError, RankLost, SluiceError
from sluice.grammar.matcher import Matcher
from sluice.types import Request, Role


@dataclass(frozen=True)
class Call:
    """A command to ``EngineCore``, by its method's name."""

    method: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Turn:
    """What happens before a step, and whether one follows: the last turn only stops."""

    calls: tuple[Call, ...]
    stop: bool = False

    def pack(self) -> bytes:
        return pickle.dumps(self)


P = ParamSpec("P")


def _replicated(
    command: Callable[Concatenate[EngineCore, P], None],
) -> Callable[Concatenate[EngineCore, P], None]:
    """The command, which is also said to the other ranks."""

    @functools.wraps(command)
    def run(core: EngineCore, /, *args: P.args, **kwargs: P.kwargs) -> None:
        assert isinstance(core, LeadingCore)
        core.say(Call(command.__name__, args, kwargs))
        command(core, *args, **kwargs)

    return run


class LeadingCore(EngineCore):
    """``EngineCore`` of rank 0. ``send`` gets every packed turn, in order, before its step."""

    send: Callable[[bytes], None]

    def lead(self, send: Callable[[bytes], None]) -> None:
        self.send = send
        self._calls: list[Call] = []

    def submit(
        self, request: Request, on_chunk: OnChunk | None = None, matcher: Matcher | None = None
    ) -> None:
        if request.sampling.grammar is not None and matcher is None:  # refused before it is said
            matcher = self.grammars.matcher(request.sampling.grammar)
        self.say(Call("submit", (request,)))
        super().submit(request, on_chunk, matcher)

    adopt = _replicated(EngineCore.adopt)
    abort = _replicated(EngineCore.abort)
    cancel = _replicated(EngineCore.cancel)  # whose abort is said too, and finds nothing to do
    release = _replicated(EngineCore.release)
    quarantine = _replicated(EngineCore.quarantine)
    retract = _replicated(EngineCore.retract)

    def shutdown(self, reason: SluiceError) -> None:
        self.send(Turn(self._taken(), stop=True).pack())
        super().shutdown(reason)

    def step(self) -> bool:
        self.send(Turn(self._taken()).pack())
        return super().step()

    def say(self, call: Call) -> None:
        """To every other rank, before its next step."""
        self._calls.append(call)

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
                getattr(core, call.method)(*call.args, *extra, **call.kwargs)
            except (PoolError, RankLost):
                raise
            except SluiceError:
                pass  # the leader answered for it
        if turn.stop:
            return
        core.step()
        core.drain()  # the leader's outputs are the ones that count
