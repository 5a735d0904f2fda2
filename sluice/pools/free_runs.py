"""Free item numbers kept as sorted runs, so that what is handed out stays contiguous."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator


class FreeRuns:
    """A set of ints stored as maximal runs ``[start, stop)`` in ascending order.

    Long runs matter twice: the transfer merges neighbouring rows into one descriptor, and gathers
    of neighbouring rows are cheaper.
    """

    def __init__(self, start: int, stop: int) -> None:
        self._starts = [start] if stop > start else []
        self._stops = [stop] if stop > start else []

    def __len__(self) -> int:
        return sum(self._stops) - sum(self._starts)

    def __iter__(self) -> Iterator[int]:
        for start, stop in zip(self._starts, self._stops, strict=True):
            yield from range(start, stop)

    def take(self, count: int, after: int = 0) -> list[int]:
        """Remove and return ``count`` numbers; the caller checks that enough exist.

        First those that continue ``after`` (itself not in the set; 0 = no wish), then the lowest
        run that fits the rest, and only when none does, the lowest numbers of several runs.
        """
        taken: list[int] = []
        at = bisect_left(self._starts, after + 1)
        if after > 0 and at < len(self._starts) and self._starts[at] == after + 1:
            taken += self._cut(at, count)
        while len(taken) < count:
            missing = count - len(taken)
            taken += self._cut(self._first_fit(missing), missing)
        return taken

    def give(self, items: Iterable[int]) -> None:
        """Put numbers back that are not in the set, merging neighbours."""
        for item in items:
            self._insert(item)

    def _first_fit(self, count: int) -> int:
        for at, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            if stop - start >= count:
                return at
        return 0

    def _cut(self, at: int, count: int) -> range:
        start = self._starts[at]
        stop = min(self._stops[at], start + count)
        if stop == self._stops[at]:
            del self._starts[at], self._stops[at]
        else:
            self._starts[at] = stop
        return range(start, stop)

    def _insert(self, item: int) -> None:
        at = bisect_right(self._starts, item)
        joins_left = at > 0 and self._stops[at - 1] == item
        joins_right = at < len(self._starts) and self._starts[at] == item + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops[at]
            del self._starts[at], self._stops[at]
        elif joins_left:
            self._stops[at - 1] = item + 1
        elif joins_right:
            self._starts[at] = item
        else:
            self._starts.insert(at, item)
            self._stops.insert(at, item + 1)
