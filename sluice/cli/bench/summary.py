"""From samples to figures: percentiles, throughput, goodput at an SLO, acceptance, cached tokens, errors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sluice.cli.bench.sample import Sample


@dataclass(frozen=True)
class Spread:
    """Seconds. Percentiles are nearest-rank: each is a value that was measured."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Slo:
    """Seconds a request may take to be good; None: not asked. ``tpot_s`` is per request, see `Sample`."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None

    def met(self, sample: Sample) -> bool:
        """A failed request meets no SLO. One with a single chunk has no time a token to miss."""
        if not sample.ok:
            return False
        limits = (
            (self.ttft_s, sample.ttft_s),
            (self.tpot_s, sample.tpot_s),
            (self.e2e_s, sample.e2e_s),
        )
        return all(limit is None or seen is None or seen <= limit for limit, seen in limits)


@dataclass(frozen=True)
class Summary:
    """Figures of one load. Latencies are of requests that came back whole; the failed are counted beside them, and
    in ``good_share`` against it. Rates are over ``wall_s``, from the first due time to the last end.
    """

    requests: int
    ok: int
    errors: tuple[tuple[str, int], ...]  # by kind, most frequent first
    wall_s: float
    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2e: Spread | None
    send_lag: Spread | None  # sent after due: the client's own delay, part of the latencies
    request_rate: float
    input_tokens_rate: float
    output_tokens_rate: float
    offered_rate: float  # requests a second that the schedule asked for
    good: int
    good_share: float
    goodput: float  # good requests a second
    acceptance: float | None  # tokens a verify step
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    cached_share: float | None
    ttft_parts: tuple[tuple[str, float], ...]  # mean seconds that the server says it spent, by part


def spread(values: Iterable[float | None]) -> Spread | None:
    """None when nothing was measured."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None

    def rank(percent: float) -> float:
        return known[max(0, math.ceil(percent / 100 * len(known)) - 1)]

    return Spread(
        len(known), sum(known) / len(known), rank(50), rank(90), rank(95), rank(99), known[-1]
    )


def summarise(samples: Sequence[Sample], slo: Slo) -> Summary:
    """Figures of ``samples``, at least one."""
    good_ones = [sample for sample in samples if sample.ok]
    began = min(sample.due_s for sample in samples)
    wall_s = max(max(sample.end_s for sample in samples) - began, 1e-9)
    last_due = max(sample.due_s for sample in samples)
    good = sum(slo.met(sample) for sample in samples)
    usages = [sample.usage for sample in good_ones if sample.usage is not None]
    serving = [usage.serving for usage in usages if usage.serving is not None]
    steps = sum(own.verify_steps for own in serving)
    accepted = sum(own.accepted_drafts for own in serving)
    prompt_tokens = sum(sample.prompt_tokens for sample in good_ones)
    output_tokens = sum(sample.output_tokens for sample in good_ones)
    stated = [usage for usage in usages if usage.cached_tokens is not None]
    cached = sum(usage.cached_tokens or 0 for usage in stated) if stated else None
    stated_prompts = sum(usage.prompt_tokens for usage in stated)
    return Summary(
        requests=len(samples),
        ok=len(good_ones),
        errors=tuple(Counter(sample.error for sample in samples if sample.error).most_common()),
        wall_s=wall_s,
        ttft=spread(sample.ttft_s for sample in good_ones),
        tpot=spread(sample.tpot_s for sample in good_ones),
        itl=spread(gap for sample in good_ones for gap in sample.gaps_s),
        e2e=spread(sample.e2e_s for sample in good_ones),
        send_lag=spread(sample.sent_s - sample.due_s for sample in samples),
        request_rate=len(good_ones) / wall_s,
        input_tokens_rate=prompt_tokens / wall_s,
        output_tokens_rate=output_tokens / wall_s,
        offered_rate=(len(samples) - 1) / (last_due - began) if last_due > began else 0.0,
        good=good,
        good_share=good / len(samples),
        goodput=good / wall_s,
        acceptance=(accepted + steps) / steps if steps else None,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        cached_tokens=cached,
        cached_share=cached / stated_prompts if cached is not None and stated_prompts else None,
        ttft_parts=_mean_parts([own.parts for own in serving]),
    )


def _mean_parts(seen: Sequence[Sequence[tuple[str, float]]]) -> tuple[tuple[str, float], ...]:
    """By name, in the order they were first named, over all that were asked."""
    sums: dict[str, float] = {}
    for parts in seen:
        for name, seconds in parts:
            sums[name] = sums.get(name, 0.0) + seconds
    return tuple((name, total / len(seen)) for name, total in sums.items())
