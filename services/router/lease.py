"""What a request gets from the fleet, a lease on a pair, and the protocol of who hands it out."""

from __future__ import annotations

from collections.abc import Callable, Collection
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from services.router.fleet import FleetView, Pair
from sluice.errors import SluiceError
from sluice.rpc.client import DecodeClient


def _nothing(*_: object) -> None: ...


@dataclass(frozen=True)
class Readiness:
    """Pairs that can serve now, and why others can't."""

    pairs: tuple[Pair, ...]
    reasons: tuple[str, ...]


class Lease:
    """A pair in use by one attempt; counted as load on both pods until closed."""

    def __init__(
        self,
        pair: Pair,
        client: DecodeClient,
        *,
        prefill_done: Callable[[], None] = _nothing,
        verdict: Callable[[SluiceError | None], None] = _nothing,
        closed: Callable[[], None] = _nothing,
    ) -> None:
        self.pair = pair
        self.client = client
        self._prefill_done = prefill_done
        self._verdict = verdict
        self._closed = closed

    def prefill_done(self) -> None:
        """The first token is here: the prefill pod is free again. Idempotent."""
        self._prefill_done()
        self._prefill_done = _nothing

    def succeeded(self) -> None:
        self._verdict(None)

    def failed(self, error: SluiceError) -> None:
        self._verdict(error)

    def close(self) -> None:
        """Give the pair back; idempotent."""
        self.prefill_done()
        self._closed()
        self._closed = _nothing


class PairSource(Protocol):
    """Where the router gets its pairs. `Pairing` has real pods; tests have a fixed one."""

    draining: bool  # this router is on its way out: /ready says no

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def readiness(self) -> Readiness: ...

    def view(self) -> FleetView: ...

    def max_model_tokens(self) -> int:
        """Smallest limit of any known pod on prompt + answer; 0 = none known."""
        ...

    def lease(
        self, prompt: tuple[int, ...], deadline: float, avoid: Collection[Pair] = ()
    ) -> AbstractAsyncContextManager[Lease]:
        """A pair not in ``avoid`` if one has room, else one of those; waits in turn while none has.

        ``deadline`` is event-loop time. Raises `NotReady` without a usable pair, `Overloaded` when too
        many wait or for too long, `DeadlineExceeded`.
        """
        ...
