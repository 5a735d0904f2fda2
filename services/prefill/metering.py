"""What a prefill pod counts, and what it lets be read of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from services.pod_metrics import PodMetrics
from sluice.telemetry.catalogue import (
    PREFILL_BUSY,
    PREFILL_CACHED_TOKENS,
    PREFILL_COMPUTE,
    PREFILL_LIVE,
    PREFILL_PAIRED,
    PREFILL_PREFIX_BYTES,
    PREFILL_PROMPT_TOKENS,
    PREFILL_QUEUE,
    PREFILL_STUCK,
    PREFILL_TRANSFER,
)
from sluice.telemetry.metrics import Sample
from sluice.transfer.messages import AttemptComplete
from sluice.types import Role


class PrefillMetrics(PodMetrics):
    """All methods run on the event loop, none on the step thread."""

    def __init__(self) -> None:
        super().__init__(Role.PREFILL)
        self._queue = self.metrics.histogram(PREFILL_QUEUE)
        self._compute = self.metrics.histogram(PREFILL_COMPUTE)
        self._transfer = self.metrics.histogram(PREFILL_TRANSFER)
        self._busy = self.metrics.counter(PREFILL_BUSY)
        self._prompt_tokens = self.metrics.counter(PREFILL_PROMPT_TOKENS)
        self._cached_tokens = self.metrics.counter(PREFILL_CACHED_TOKENS)

    def completed(self, complete: AttemptComplete, busy_s: float) -> None:
        timings = complete.timings
        self._queue.observe(timings.queue_s)
        self._compute.observe(timings.prefill_s)
        self._transfer.observe(timings.transfer_s)
        self._busy.inc(busy_s)
        self._prompt_tokens.inc(complete.prompt_tokens)
        self._cached_tokens.inc(complete.cached_tokens)
        self.crossed(complete.components)

    def watch_attempts(
        self,
        paired: Callable[[], int],
        live: Callable[[], int],
        stuck: Callable[[], int],
        prefix_bytes: Callable[[], int],
    ) -> None:
        """Read these from now on."""

        def read() -> Iterator[Sample]:
            yield Sample(PREFILL_PAIRED, paired())
            yield Sample(PREFILL_LIVE, live())
            yield Sample(PREFILL_STUCK, stuck())
            yield Sample(PREFILL_PREFIX_BYTES, prefix_bytes())

        lazy = (PREFILL_PAIRED, PREFILL_LIVE, PREFILL_STUCK, PREFILL_PREFIX_BYTES)
        self.metrics.lazily(lazy, read)
