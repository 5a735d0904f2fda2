"""What a decode pod counts, and what it lets be read of itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.decode.acceptance import AcceptanceWatch
from services.decode.peer import PeerState
from services.decode.peers import Peers
from services.pod import Pod
from services.pod_metrics import PodMetrics
from sluice.telemetry.catalogue import (
    ACCEPTANCE,
    ACCEPTANCE_ALARMS,
    ACCEPTANCE_COLLAPSED,
    ACCEPTANCE_RECENT,
    CANARY_PASSED_AT,
    CANARY_RATE,
    CANARY_RUNS,
    CANARY_SECONDS,
    E2E,
    ITL,
    OUTPUT_TOKENS,
    PARTS,
    PEERS,
    QUARANTINED,
    QUARANTINES,
    RETRACTED,
    RETRACTIONS,
    TRANSPORT,
    TTFT,
    TTFT_PART,
)
from sluice.telemetry.metrics import Sample
from sluice.transfer.messages import Timings
from sluice.types import Role


class DecodeMetrics(PodMetrics):
    """All methods run on the event loop, none on the step thread."""

    def __init__(self, acceptance: AcceptanceWatch) -> None:
        super().__init__(Role.DECODE)
        self.acceptance = acceptance
        self._ttft = self.metrics.histogram(TTFT)
        parts = self.metrics.histogram(TTFT_PART)
        self._parts = tuple(parts.labels(part) for part in PARTS)
        self._itl = self.metrics.histogram(ITL)
        self._e2e = self.metrics.histogram(E2E)
        self._tokens = self.metrics.counter(OUTPUT_TOKENS)
        self._accepted = self.metrics.histogram(ACCEPTANCE)
        self._canaries = self.metrics.counter(CANARY_RUNS)
        self._canary_s = self.metrics.histogram(CANARY_SECONDS)

    def first_token(self, timings: Timings) -> None:
        self._ttft.observe(timings.ttft_s)
        for part, seconds in zip(self._parts, timings.parts, strict=True):
            part.observe(seconds)
        self._tokens.inc()

    def step(self, gap_s: float, num_tokens: int, accepted_drafts: int | None) -> None:
        """One step of a request after its first token."""
        self._itl.observe(gap_s / max(1, num_tokens))
        self._tokens.inc(num_tokens)
        if accepted_drafts is not None:
            self._accepted.observe(accepted_drafts + 1)
            self.acceptance.step(accepted_drafts)

    def finished(self, seconds: float) -> None:
        self._e2e.observe(seconds)

    def canary_ended(self, outcome: str, seconds: float) -> None:
        self._canaries.labels(outcome).inc()
        self._canary_s.observe(seconds)

    def watch_peers(self, pod: Pod, peers: Peers) -> None:
        """Read pairings and engine of this pod from now on."""

        def read() -> Iterator[Sample]:
            stats, acceptance = pod.engine.latest_stats, self.acceptance
            yield Sample(RETRACTIONS, stats.retractions)
            yield Sample(RETRACTED, stats.retracted)
            yield Sample(ACCEPTANCE_RECENT, acceptance.recent_tokens)
            yield Sample(ACCEPTANCE_COLLAPSED, acceptance.collapsed)
            yield Sample(ACCEPTANCE_ALARMS, acceptance.alarms)
            yield Sample(QUARANTINED, peers.num_held())
            yield Sample(QUARANTINES, peers.quarantines)
            yield from _peer_samples(peers)

        lazy = (
            RETRACTIONS,
            RETRACTED,
            ACCEPTANCE_RECENT,
            ACCEPTANCE_COLLAPSED,
            ACCEPTANCE_ALARMS,
            QUARANTINED,
            QUARANTINES,
            PEERS,
            CANARY_PASSED_AT,
            CANARY_RATE,
            TRANSPORT,
        )
        self.metrics.lazily(lazy, read)


def _peer_samples(peers: Peers) -> Iterator[Sample]:
    statuses = [peer.status() for peer in peers.all()]
    for peer in peers.all():
        # Also while later ones fail: its age is what an alarm looks at.
        if peer.canary_passed_unix_s:
            yield Sample(CANARY_PASSED_AT, peer.canary_passed_unix_s, (peer.address,))
    counts = Counter(status.state for status in statuses)
    for state in PeerState:
        yield Sample(PEERS, counts[state.value], (state.value,))
    for status in statuses:
        canary = status.canary
        if canary is None:
            continue
        if canary.transport:
            yield Sample(TRANSPORT, 1, (status.address, canary.transport))
        for moved in canary.components:
            if moved.seconds:
                yield Sample(CANARY_RATE, moved.bytes_per_s, (status.address, moved.component))
