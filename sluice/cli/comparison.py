"""Two runs of the same prompts, compared token by token and step by step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Answer:
    """What one run gave for one prompt. ``accepted`` has one entry a step, None without a draft."""

    token_ids: tuple[int, ...]
    accepted: tuple[int | None, ...]
    reason: str


@dataclass(frozen=True)
class Difference:
    """First places where two answers part. None = they don't."""

    prompt: int  # index
    token: int | None
    step: int | None
    reasons: tuple[str, str] | None

    @property
    def equal(self) -> bool:
        return self.token is None and self.step is None and self.reasons is None


def compare(prompt: int, aggregated: Answer, disaggregated: Answer) -> Difference:
    a, b = aggregated, disaggregated
    return Difference(
        prompt=prompt,
        token=first_difference(a.token_ids, b.token_ids),
        step=first_difference(a.accepted, b.accepted),
        reasons=None if a.reason == b.reason else (a.reason, b.reason),
    )


def first_difference(a: Sequence[object], b: Sequence[object]) -> int | None:
    """Index of the first unequal item; the shorter length when one is the other's beginning."""
    missing = object()
    pairs = zip_longest(a, b, fillvalue=missing)
    return next((index for index, (left, right) in enumerate(pairs) if left != right), None)


def acceptance_length(answers: Sequence[Answer]) -> float:
    """Mean tokens a verify step emits: accepted drafts + 1. 0 when nothing was drafted."""
    counts = [count for answer in answers for count in answer.accepted if count is not None]
    return sum(counts) / len(counts) + 1 if counts else 0.0
