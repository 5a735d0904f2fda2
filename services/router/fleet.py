"""What the router knows of its fleet at one moment, as plain data: for readiness, metrics and the status page."""

from __future__ import annotations

from dataclasses import dataclass

from services.discovery.registry import PodState
from sluice.rpc.messages import DecodeStatus
from sluice.types import Epoch, Role

_UNKNOWN = Epoch("")


@dataclass(frozen=True, order=True)
class Pair:
    """Two pods that have agreed, in these two lives of theirs. Another life is another pair."""

    decode: str
    prefill: str
    decode_epoch: Epoch = _UNKNOWN
    prefill_epoch: Epoch = _UNKNOWN
    digest: str = ""  # of their agreement

    def __str__(self) -> str:
        return f"{self.decode} with {self.prefill}"


@dataclass(frozen=True)
class PodView:
    """One pod. ``status`` is a decode pod's last word; of prefill pods the router hears through decode.

    ``state`` is discovery's, None for a prefill that only decode pods name. ``in_flight`` counts this
    router's attempts on it (on a prefill: until their first token), ``in_use`` also other routers';
    ``capacity`` is how many it takes at once, 0 = it doesn't say.
    """

    role: Role
    address: str
    name: str
    state: PodState | None
    in_flight: int
    in_use: int
    capacity: int
    problem: str = ""
    status: DecodeStatus | None = None


@dataclass(frozen=True)
class PairView:
    """One cell of the agreement matrix.

    ``state``: as the decode pod says (connecting, agreed, refused, lost, draining), or ``unknown`` when it
    doesn't know the prefill or doesn't answer. ``usable``: requests may go there now. ``breaker``: closed, open
    or half-open.
    """

    pair: Pair
    state: str
    reason: str
    usable: bool
    breaker: str
    in_flight: int


@dataclass(frozen=True)
class FleetView:
    """``version`` and ``problem`` are discovery's; ``waiting`` requests have no pair yet."""

    version: int
    problem: str
    pods: tuple[PodView, ...]
    pairs: tuple[PairView, ...]
    waiting: int
    in_flight: int
