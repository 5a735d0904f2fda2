"""Which prefill and decode pod serve a request: the least loaded pair that has agreed."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from sluice.errors import DeadlineExceeded, NotReady, SluiceError
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient
from sluice.rpc.messages import DecodeStatus
from sluice.telemetry.logging import get_logger

_STATUS_TIMEOUT_S = 1.0
_MAX_BACKOFF_S = 2.0
_LATE_ANSWERS = (
    3  # a busy pod answers between two steps; only so many late ones in a row are a loss
)
_log = get_logger(__name__)


@dataclass(frozen=True, order=True)
class Pair:
    """Addresses of the two pods."""

    decode: str
    prefill: str


@dataclass(frozen=True)
class Readiness:
    """Pairs that can serve now, and why others can't."""

    pairs: tuple[Pair, ...]
    reasons: tuple[str, ...]


class Lease:
    """A pair in use by one attempt; counted as load until left."""

    def __init__(self, pair: Pair, client: DecodeClient, prefill_done: Callable[[], None]) -> None:
        self.pair = pair
        self.client = client
        self._prefill_done: Callable[[], None] | None = prefill_done

    def prefill_done(self) -> None:
        """The first token is here: the prefill pod is free again. Idempotent."""
        if self._prefill_done is not None:
            self._prefill_done()
            self._prefill_done = None


class PairSource(Protocol):
    """Where the router gets its pairs. Static lists here; discovery is another implementation."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def readiness(self) -> Readiness: ...

    def max_model_tokens(self) -> int:
        """Smallest limit of any known pod on prompt + answer; 0 = none known."""
        ...

    def lease(self, avoid: Collection[Pair] = ()) -> AbstractContextManager[Lease]:
        """A pair not in ``avoid`` if there is one, else one of those. Raises `NotReady`."""
        ...

    def suspect(self, pair: Pair) -> None:
        """An attempt on ``pair`` failed: look again soon."""
        ...


@dataclass
class _Decode:
    """One decode pod as last seen."""

    client: DecodeClient
    status: DecodeStatus | None = None
    problem: str = "not asked yet"
    late_answers: int = 0
    max_model_tokens: int = 0  # as last stated: a limit doesn't end with a lost status
    look_again: asyncio.Event = field(default_factory=asyncio.Event)


class StaticPairing:
    """Fixed addresses; each decode pod is asked for its status about once a second."""

    def __init__(
        self,
        decodes: Sequence[str],
        prefills: Sequence[str] = (),
        refresh_s: float = 1.0,
        channel: ChannelConfig | None = None,
    ) -> None:
        self._addresses = tuple(decodes)
        self._prefills = frozenset(prefills)
        self._refresh_s = refresh_s
        self._channel = channel
        self._decodes: dict[str, _Decode] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._running: Counter[str] = Counter()  # attempts of this router, by address
        self._picked: dict[Pair, int] = {}
        self._picks = itertools.count(1)

    async def start(self) -> None:
        """Ask every pod once (bounded), then keep asking in the background."""
        self._decodes = {
            address: _Decode(DecodeClient(address, self._channel)) for address in self._addresses
        }
        await asyncio.gather(*(self._ask(decode) for decode in self._decodes.values()))
        self._tasks = [
            asyncio.create_task(self._watch(address, decode), name=f"watch {address}")
            for address, decode in self._decodes.items()
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for decode in self._decodes.values():
            await decode.client.close()

    def readiness(self) -> Readiness:
        pairs: list[Pair] = []
        reasons: list[str] = []
        for address, decode in sorted(self._decodes.items()):
            found, why_not = self._pairs_of(address, decode)
            pairs += found
            reasons += why_not
        return Readiness(tuple(pairs), tuple(reasons))

    def max_model_tokens(self) -> int:
        stated = (decode.max_model_tokens for decode in self._decodes.values())
        return min((limit for limit in stated if limit), default=0)

    @contextmanager
    def lease(self, avoid: Collection[Pair] = ()) -> Iterator[Lease]:
        seen = self.readiness()
        if not seen.pairs:
            why = "; ".join(seen.reasons) or "no decode pod is configured"
            raise NotReady(f"no agreed pair: {why}", stage="pair")
        pair = min(seen.pairs, key=lambda pair: (pair in avoid, self._load(pair), self._age(pair)))
        self._picked[pair] = next(self._picks)
        self._running.update((pair.decode, pair.prefill))
        lease = Lease(
            pair,
            self._decodes[pair.decode].client,
            lambda: self._running.subtract((pair.prefill,)),
        )
        try:
            yield lease
        finally:
            lease.prefill_done()
            self._running.subtract((pair.decode,))

    def suspect(self, pair: Pair) -> None:
        if (decode := self._decodes.get(pair.decode)) is not None:
            decode.look_again.set()

    def _load(self, pair: Pair) -> int:
        status = self._decodes[pair.decode].status
        # The pod's own count lags by a refresh but sees other routers; ours is exact but partial.
        reported = status.queued + status.running if status else 0
        return max(self._running[pair.decode], reported) + self._running[pair.prefill]

    def _age(self, pair: Pair) -> int:
        return self._picked.get(pair, 0)

    def _pairs_of(self, address: str, decode: _Decode) -> tuple[list[Pair], list[str]]:
        status = decode.status
        if status is None:
            return [], [f"decode {address}: {decode.problem}"]
        if not status.ready:
            return [], [f"decode {address}: {status.reason or 'not ready'}"]
        peers = [p for p in status.peers if not self._prefills or p.address in self._prefills]
        pairs = [Pair(address, peer.address) for peer in peers if peer.state == "agreed"]
        reasons = [
            f"decode {address}: prefill {peer.address} is {peer.state}: {peer.reason or 'no reason'}"
            for peer in peers
            if peer.state != "agreed"
        ]
        missing = sorted(self._prefills - {peer.address for peer in peers})
        return pairs, reasons + [f"decode {address}: prefill {a} is unknown to it" for a in missing]

    async def _watch(self, address: str, decode: _Decode) -> None:
        pause_s = self._refresh_s
        while True:
            try:
                async with asyncio.timeout(pause_s):
                    await decode.look_again.wait()
            except TimeoutError:
                pass
            decode.look_again.clear()
            if await self._ask(decode):
                pause_s = self._refresh_s
            else:
                pause_s = min(max(pause_s * 2, self._refresh_s), _MAX_BACKOFF_S)

    async def _ask(self, decode: _Decode) -> bool:
        before = decode.status is not None
        try:
            decode.status = await decode.client.get_status(_STATUS_TIMEOUT_S)
            decode.late_answers = 0
            decode.max_model_tokens = decode.status.max_model_tokens
        except DeadlineExceeded as error:
            decode.late_answers += 1
            decode.problem = str(error)
            if decode.late_answers >= _LATE_ANSWERS:
                decode.status = None
        except SluiceError as error:
            decode.status, decode.problem = None, str(error)
        except Exception as error:  # a watcher that died would freeze the view for ever
            decode.status, decode.problem = None, f"{type(error).__name__}: {error}"
            _log.error("pairing_status_failed", exc_info=error)
        after = decode.status is not None
        if before != after:
            _log.info("decode_seen" if after else "decode_lost", decode=decode.client.address)
        return after
