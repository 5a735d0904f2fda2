"""What the router counts, and what it lets be read of its fleet."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from services.router.fleet import FleetView
from sluice.telemetry.catalogue import (
    ATTEMPTS,
    BREAKER,
    HTTP_REQUESTS,
    REQUESTS,
    RETRIES,
    ROUTER_CACHED_TOKENS,
    ROUTER_E2E,
    ROUTER_ITL,
    ROUTER_OUTPUT_TOKENS,
    ROUTER_PAIRS,
    ROUTER_PARTS,
    ROUTER_PODS,
    ROUTER_PROMPT_TOKENS,
    ROUTER_QUEUED,
    ROUTER_RUNNING,
    ROUTER_TTFT,
    ROUTER_TTFT_PART,
)
from sluice.telemetry.metrics import Metrics, Sample

_BREAKER_VALUES = {"closed": 0, "half-open": 1, "open": 2}


class RouterMetrics:
    """For the event loop."""

    def __init__(self) -> None:
        self.metrics = Metrics()
        counter, histogram = self.metrics.counter, self.metrics.histogram
        self._http = counter(HTTP_REQUESTS)
        self._answers = counter(REQUESTS)
        self._attempts = counter(ATTEMPTS)
        self._retries = counter(RETRIES)
        self._ttft = histogram(ROUTER_TTFT)
        parts = histogram(ROUTER_TTFT_PART)
        self._parts = tuple(parts.labels(part) for part in ROUTER_PARTS)
        self._itl = histogram(ROUTER_ITL)
        self._e2e = histogram(ROUTER_E2E)
        self._prompt_tokens = counter(ROUTER_PROMPT_TOKENS)
        self._cached_tokens = counter(ROUTER_CACHED_TOKENS)
        self._output_tokens = counter(ROUTER_OUTPUT_TOKENS)

    def http(self, route: str, status: int) -> None:
        """``route`` as declared, never a path that a client made up."""
        self._http.labels(route, str(status)).inc()

    def attempt_ended(self, outcome: str) -> None:
        self._attempts.labels(outcome).inc()

    def retried(self, code: str) -> None:
        self._retries.labels(code).inc()

    def gap(self, seconds_a_token: float) -> None:
        self._itl.observe(seconds_a_token)

    def ended(
        self,
        *,
        outcome: str,
        seconds: float,
        ttft_s: float | None,
        parts: Sequence[float],
        prompt_tokens: int,
        cached_tokens: int,
        output_tokens: int,
    ) -> None:
        self._answers.labels(outcome).inc()
        self._e2e.observe(seconds)
        self._output_tokens.inc(output_tokens)
        if ttft_s is None:
            return
        self._prompt_tokens.inc(prompt_tokens)
        self._cached_tokens.inc(cached_tokens)
        self._ttft.observe(ttft_s)
        for part, part_s in zip(self._parts, parts, strict=True):
            part.observe(part_s)

    def watch(self, view: Callable[[], FleetView], running: Callable[[], int]) -> None:
        """Read the fleet from now on."""

        def read() -> Iterator[Sample]:
            fleet = view()
            yield Sample(ROUTER_RUNNING, running())
            yield Sample(ROUTER_QUEUED, fleet.waiting)
            pods = Counter((pod.role.value, _pod_state(pod.problem)) for pod in fleet.pods)
            for labels, count in pods.items():
                yield Sample(ROUTER_PODS, count, labels)
            for state, count in Counter(pair.state for pair in fleet.pairs).items():
                yield Sample(ROUTER_PAIRS, count, (state,))
            for (decode, prefill), breaker in {
                (pair.pair.decode, pair.pair.prefill): pair.breaker for pair in fleet.pairs
            }.items():
                yield Sample(BREAKER, _BREAKER_VALUES.get(breaker, 0), (decode, prefill))

        lazy = (ROUTER_RUNNING, ROUTER_QUEUED, ROUTER_PODS, ROUTER_PAIRS, BREAKER)
        self.metrics.lazily(lazy, read)


def _pod_state(problem: str) -> str:
    return "problem" if problem else "ok"
