"""Which of the pairs that have room takes a request: three policies behind one small protocol."""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from services.router.fleet import Pair


@dataclass(frozen=True)
class Load:
    """Requests a pod has, and how many it takes at once (0 = it doesn't say)."""

    in_use: int
    capacity: int

    @property
    def full(self) -> bool:
        return 0 < self.capacity <= self.in_use

    @property
    def share(self) -> float:
        return self.in_use / (self.capacity or 1)


@dataclass(frozen=True)
class Candidate:
    """A pair with room. ``last_pick`` orders the router's picks; 0 = never."""

    pair: Pair
    decode: Load
    prefill: Load
    last_pick: int

    @property
    def load(self) -> tuple[float, int]:
        """Less is better; of equals the one that waited longest."""
        return self.decode.share + self.prefill.share, self.last_pick


class Policy(Protocol):
    def choose(self, candidates: Sequence[Candidate], prompt: tuple[int, ...]) -> Candidate:
        """One of ``candidates``, of which there is at least one; the request goes there."""
        ...


class LeastLoad:
    """The pair with most of its capacity free, both pods counted."""

    def choose(self, candidates: Sequence[Candidate], prompt: tuple[int, ...]) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.load)


class RoundRobin:
    """The pair that waited longest."""

    def choose(self, candidates: Sequence[Candidate], prompt: tuple[int, ...]) -> Candidate:
        return min(candidates, key=lambda candidate: candidate.last_pick)


class PrefixAffinity:
    """The prefill pod that last saw the longest page-aligned prefix of the prompt, if it isn't crowded.

    A prompt with no known prefix goes where rendezvous hashing of its first page sends it, so that several
    routers agree. Crowded: more than ``bound`` times the mean load (consistent hashing with bounded loads, Mirrokni
    et al., 2018). Of that prefill's pairs the least loaded is taken. A prefill's new life knows no prefixes.
    """

    def __init__(self, block_tokens: int, bound: float = 1.5, remembered: int = 65_536) -> None:
        self._block_tokens = block_tokens
        self._bound = bound
        self._remembered = remembered
        self._seen: OrderedDict[bytes, tuple[str, str]] = OrderedDict()  # prefix: prefill, epoch

    def choose(self, candidates: Sequence[Candidate], prompt: tuple[int, ...]) -> Candidate:
        keys = tuple(self._prefixes(prompt))
        roomy = self._roomy(candidates)
        place = self._longest(keys, roomy) or self._rendezvous(keys, roomy)
        chosen = min(
            (c for c in candidates if place is None or _place(c) == place),
            key=lambda candidate: candidate.load,
        )
        self._remember(keys, _place(chosen))
        return chosen

    def _prefixes(self, prompt: tuple[int, ...]) -> Iterator[bytes]:
        """A digest for each whole page of the prompt, standing for everything up to its end."""
        running = hashlib.blake2b(digest_size=16)
        for stop in range(self._block_tokens, len(prompt) + 1, self._block_tokens):
            block = prompt[stop - self._block_tokens : stop]
            running.update(b"".join(token.to_bytes(4, "little") for token in block))
            yield running.digest()

    def _roomy(self, candidates: Sequence[Candidate]) -> set[tuple[str, str]]:
        loads = {_place(c): c.prefill.in_use for c in candidates}
        most = math.ceil(self._bound * (sum(loads.values()) + 1) / len(loads))
        return {place for place, load in loads.items() if load < most}

    def _longest(
        self, keys: Sequence[bytes], roomy: set[tuple[str, str]]
    ) -> tuple[str, str] | None:
        found = (self._seen.get(key) for key in reversed(keys))
        return next((place for place in found if place in roomy), None)

    def _rendezvous(
        self, keys: Sequence[bytes], roomy: set[tuple[str, str]]
    ) -> tuple[str, str] | None:
        if not keys or not roomy:
            return None
        return max(roomy, key=lambda place: _weight(keys[0], place[0]))

    def _remember(self, keys: Sequence[bytes], place: tuple[str, str]) -> None:
        for key in keys:
            self._seen[key] = place
            self._seen.move_to_end(key)
        while len(self._seen) > self._remembered:
            self._seen.popitem(last=False)


def _place(candidate: Candidate) -> tuple[str, str]:
    return candidate.pair.prefill, candidate.pair.prefill_epoch


def _weight(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + address.encode(), digest_size=8).digest()


class PolicyName(Enum):
    LEAST_LOAD = "least_load"
    PREFIX_AFFINITY = "prefix_affinity"
    ROUND_ROBIN = "round_robin"


def make_policy(name: PolicyName, block_tokens: int) -> Policy:
    match name:
        case PolicyName.LEAST_LOAD:
            return LeastLoad()
        case PolicyName.PREFIX_AFFINITY:
            return PrefixAffinity(block_tokens)
        case PolicyName.ROUND_ROBIN:
            return RoundRobin()
