"""Answers and tokens a second over the last minute, in sixty numbers each."""

from __future__ import annotations

import time
from collections.abc import Callable

WINDOW_S = 60


class Rates:
    """One bucket a second, reused after a minute."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._second = [-1] * WINDOW_S
        self._answers = [0] * WINDOW_S
        self._tokens = [0] * WINDOW_S

    def answer(self) -> None:
        self._answers[self._bucket()] += 1

    def tokens(self, count: int) -> None:
        self._tokens[self._bucket()] += count

    def per_second(self) -> tuple[float, float]:
        """Answers and tokens; over less than a minute while the process is younger."""
        now = self._clock()
        span_s = max(1.0, min(float(WINDOW_S), now - self._began))
        live = [i for i, second in enumerate(self._second) if int(now) - second < WINDOW_S]
        answers = sum(self._answers[i] for i in live)
        tokens = sum(self._tokens[i] for i in live)
        return answers / span_s, tokens / span_s

    def _bucket(self) -> int:
        second = int(self._clock())
        index = second % WINDOW_S
        if self._second[index] != second:
            self._second[index] = second
            self._answers[index] = self._tokens[index] = 0
        return index
