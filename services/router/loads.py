"""How busy each pod is: this router's own attempts, exactly, and what the pods say of others'."""

from __future__ import annotations

from collections import Counter

from services.router.fleet import Pair


class Loads:
    """Counts by address. An attempt loads its decode pod to the end, its prefill pod to the first token."""

    def __init__(self) -> None:
        self._own: Counter[str] = Counter()
        self._pairs: Counter[Pair] = Counter()
        self._others: dict[str, int] = {}

    def enter(self, pair: Pair) -> None:
        """Both at once: there is no moment at which only half of a pair is taken."""
        self._own.update((pair.decode, pair.prefill))
        self._pairs[pair] += 1

    def leave_prefill(self, pair: Pair) -> None:
        self._drop(pair.prefill)

    def leave(self, pair: Pair) -> None:
        self._drop(pair.decode)
        self._pairs[pair] -= 1
        if self._pairs[pair] <= 0:
            del self._pairs[pair]

    def heard(self, address: str, in_use: int) -> None:
        """A pod said how many requests it has. Its word is as old as the answer, our count isn't: only what
        exceeds our own now is taken for others'."""
        self._others[address] = max(0, in_use - self._own[address])

    def forget_others(self, known: set[str]) -> None:
        for address in self._others.keys() - known:
            del self._others[address]

    def own(self, address: str) -> int:
        return self._own[address]

    def total(self, address: str) -> int:
        return self._own[address] + self._others.get(address, 0)

    def on_pair(self, pair: Pair) -> int:
        return self._pairs[pair]

    def in_flight(self) -> int:
        return self._pairs.total()

    def _drop(self, address: str) -> None:
        self._own[address] -= 1
        if self._own[address] <= 0:
            del self._own[address]
