"""Samples for tests: one line each."""

from __future__ import annotations

from sluice.cli.bench.sample import Sample
from sluice.cli.stream import Serving, UsageSeen


def sample(
    due: float = 0.0,
    *chunks: float,
    tokens: int | None = None,
    sent: float | None = None,
    end: float | None = None,
    cached: int | None = None,
    steps: int | None = None,
    accepted: int = 0,
    prompt: int = 10,
    error: str = "",
) -> Sample:
    """Times in seconds since the load began."""
    count = len(chunks) if tokens is None else tokens
    serving = (
        None if steps is None else Serving(steps, accepted, (("queue", 0.1), ("prefill", 0.2)))
    )
    return Sample(
        due,
        due if sent is None else sent,
        end if end is not None else (chunks[-1] if chunks else due),
        chunks,
        prompt,
        count,
        UsageSeen(prompt, count, cached, serving),
        error,
        f"detail of {error}" if error else "",
    )
