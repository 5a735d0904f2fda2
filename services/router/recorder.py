"""What the router notes of every answer it makes: counters for scrapes, and the last few for the status page.

Never what was said: a record has counts, times, addresses and ids.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from services.router.fleet import Pair
from services.router.metering import RouterMetrics
from services.router.rates import Rates
from sluice.errors import SluiceError, as_sluice_error
from sluice.rpc.messages import GenerateCall, Tokens, Usage
from sluice.transfer.messages import Timings
from sluice.types import FinishReason, RequestId

KEPT_ENDED = 60  # requests that the status page can still show
KEPT_TTFTS = 1000
RUNNING = "running"


@dataclass
class Record:
    """One answer to one prompt. Times are monotonic seconds except ``started_unix_s``."""

    request_id: RequestId
    prompt_tokens: int
    started_unix_s: float = field(default_factory=time.time)
    started_s: float = field(default_factory=time.monotonic)
    outcome: str = RUNNING
    attempts: int = 0
    attempt_id: str = ""
    decode: str = ""
    prefill: str = ""
    first_token_s: float | None = None
    newest_token_s: float = 0.0
    ended_s: float | None = None
    timings: Timings | None = None  # decode's, of the last attempt
    output_tokens: int = 0
    verify_steps: int = 0
    accepted_drafts: int = 0
    cached_tokens: int | None = None  # known at the end only

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.started_s

    def parts(self) -> tuple[float, ...]:
        """Route, queue, prefill, transfer, adopt, first decode: they add up to the time to the first token.

        What decode's own time to the first token leaves is the router's: choosing a pair, earlier attempts, gRPC.
        """
        timings = self.timings or Timings()
        return (max(0.0, (self.ttft_s or 0.0) - timings.ttft_s), *timings.parts)


class Watched:
    """One answer in the making; `Recorder.answer` makes it and ends it."""

    def __init__(self, record: Record, metrics: RouterMetrics, rates: Rates) -> None:
        self.record = record
        self._metrics = metrics
        self._rates = rates

    def attempt(self, call: GenerateCall, pair: Pair) -> None:
        record = self.record
        record.attempts += 1
        record.attempt_id, record.decode, record.prefill = (
            call.attempt_id,
            pair.decode,
            pair.prefill,
        )
        # Of a failed attempt nothing was kept, so nothing of it counts.
        record.first_token_s = record.timings = None
        record.output_tokens = record.verify_steps = record.accepted_drafts = 0

    def attempt_failed(self, error: SluiceError, *, again: bool) -> None:
        self._metrics.attempt_ended(error.code)
        if again:
            self._metrics.retried(error.code)

    def tokens(self, step: Tokens) -> None:
        record, now = self.record, time.monotonic()
        if record.first_token_s is None:
            record.first_token_s, record.timings = now, step.timings
        else:
            self._metrics.gap((now - record.newest_token_s) / max(1, len(step.token_ids)))
        record.newest_token_s = now
        record.output_tokens += len(step.token_ids)
        if step.accepted_drafts is not None:
            record.verify_steps += 1
            record.accepted_drafts += step.accepted_drafts
        self._rates.tokens(len(step.token_ids))

    def finished(self, reason: FinishReason, usage: Usage | None = None) -> None:
        """``usage`` as prefill and decode counted it; None when a stop string cut the answer."""
        self.record.outcome = reason.value
        self._metrics.attempt_ended(reason.value)
        if usage is not None:
            self.record.cached_tokens = usage.cached_tokens
            self.record.timings = usage.timings


class Recorder:
    """Owns the records: those that run, and a bounded number of ended ones. For the event loop."""

    def __init__(self, metrics: RouterMetrics) -> None:
        self.metrics = metrics
        self.rates = Rates()
        self.started_unix_s = time.time()
        self.answers = 0  # ended, since the start
        self.failures = 0  # of those, not by stop or length
        self._running: dict[int, Record] = {}
        self._ended: deque[Record] = deque(maxlen=KEPT_ENDED)
        self._ttfts: deque[float] = deque(maxlen=KEPT_TTFTS)

    @contextmanager
    def answer(self, request_id: RequestId, prompt_tokens: int) -> Iterator[Watched]:
        """Around everything that is done for one answer, retries included."""
        record = Record(request_id, prompt_tokens)
        self._running[id(record)] = record
        watched = Watched(record, self.metrics, self.rates)
        try:
            yield watched
        except Exception as error:
            record.outcome = as_sluice_error(error).code
            raise
        finally:
            if record.outcome == RUNNING:  # its reader went away
                record.outcome = "cancelled"
                self.metrics.attempt_ended("cancelled")
            self._end(record)

    def records(self) -> list[Record]:
        """The newest first."""
        shown = [*self._running.values(), *self._ended]
        return sorted(shown, key=lambda record: record.started_s, reverse=True)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def ttft_quantile(self, share: float) -> float | None:
        """Of the last answers; None before the first."""
        if not self._ttfts:
            return None
        ordered = sorted(self._ttfts)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    def _end(self, record: Record) -> None:
        record.ended_s = time.monotonic()
        del self._running[id(record)]
        self._ended.append(record)
        self.answers += 1
        if record.outcome not in (FinishReason.STOP.value, FinishReason.LENGTH.value):
            self.failures += 1
        self.rates.answer()
        if record.ttft_s is not None:
            self._ttfts.append(record.ttft_s)
        self.metrics.ended(
            outcome=record.outcome,
            seconds=record.ended_s - record.started_s,
            ttft_s=record.ttft_s,
            parts=record.parts(),
            prompt_tokens=record.prompt_tokens,
            cached_tokens=record.cached_tokens or 0,
            output_tokens=record.output_tokens,
        )
