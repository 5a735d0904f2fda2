"""What the engine tells the outside about requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sluice.errors import SluiceError
from sluice.pools.base import Occupancy, RequestTables
from sluice.types import (
    FinishReason,
    Logprobs,
    PromptLogprobs,
    Request,
    RequestId,
    TokenEvent,
)


@dataclass(frozen=True)
class ChunkReady:
    """Prefill role: rows ``[start, stop)`` of the prompt are there (computed, or from a kept prefix),
    and final for HISTORY components.

    ``first_token`` comes with the final chunk. ``tables`` may be read until ``release()``.
    ``fence()`` blocks until the device has finished the target's AND the draft's kernels of this
    chunk (does nothing on CPU).
    """

    request_id: RequestId
    start: int
    stop: int
    final: bool
    first_token: int | None
    tables: RequestTables
    fence: Callable[[], None]


@dataclass(frozen=True)
class PrefillOutcome:
    """End of a prefill. ``finish_reason`` is set when the first token is also the last; logprobs when they
    were asked for.
    """

    first_token: int
    finish_reason: FinishReason | None
    queue_s: float
    prefill_s: float
    cached_tokens: int = 0  # of the prompt, from a kept prefix
    first_logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


@dataclass(frozen=True)
class Reservation:
    """Decode role: items for the whole prompt are mapped (and filled, in debug mode) and ready to
    be written.
    """

    request: Request
    tables: RequestTables


@dataclass(frozen=True)
class Reserved:
    request_id: RequestId
    reservation: Reservation


@dataclass(frozen=True)
class Prefilled:
    request_id: RequestId
    outcome: PrefillOutcome


@dataclass(frozen=True)
class Failed:
    """The request is over; what it held is given back, or waits for ``release()`` in the prefill
    role.
    """

    request_id: RequestId
    error: SluiceError


Output = TokenEvent | Reserved | Prefilled | Failed


@dataclass(frozen=True)
class EngineStats:
    """A snapshot between two steps.

    ``running`` counts requests that compute; ``waiting`` those that hold items but don't (reserved,
    held, quarantined); ``retracted`` those that hold nothing but a backup on the host. ``baseline``:
    no allocator has a held or quarantined item. ``retractions`` counts them since the start.
    ``prefix_bytes`` are kept for prompts that begin alike, in pages and on the host.
    """

    queued: int
    running: int
    waiting: int
    steps: int
    occupancy: tuple[Occupancy, ...]
    retracted: int = 0
    retractions: int = 0
    prefix_bytes: int = 0

    @property
    def baseline(self) -> bool:
        return all(space.held == 0 and space.quarantined == 0 for space in self.occupancy)
