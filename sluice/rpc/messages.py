"""What the router and an operator hear from a decode pod, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.errors import SluiceError
from sluice.layout.layout import Layout
from sluice.layout.outcome import Mismatch
from sluice.pools.base import Occupancy
from sluice.transfer.messages import Moved, Timings
from sluice.types import (
    AttemptId,
    Epoch,
    FinishReason,
    Logprobs,
    PromptLogprobs,
    RequestId,
    Sampling,
)


@dataclass(frozen=True)
class GenerateCall:
    """One attempt at one request on one pair. ``timeout_s`` is what is left of the deadline."""

    request_id: RequestId
    attempt_id: AttemptId
    prefill_address: str
    prompt: tuple[int, ...]
    sampling: Sampling
    timeout_s: float


@dataclass(frozen=True)
class Tokens:
    """New tokens, in order. ``accepted_drafts`` and ``logprobs`` as in `sluice.types.TokenEvent`."""

    token_ids: tuple[int, ...]
    accepted_drafts: int | None = None
    logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True)
class PromptScored:
    """The prompt's tokens under the model: one entry a token, None for the first. Sent once, before any
    ``Tokens``, when ``prompt_logprobs`` were asked for.
    """

    positions: PromptLogprobs


@dataclass(frozen=True)
class Usage:
    """Prompt and cached tokens as prefill counted them, the rest as decode did."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    verify_steps: int = 0
    accepted_drafts: int = 0
    timings: Timings = field(default_factory=Timings)
    components: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class Finished:
    """The last message of a request that went well."""

    reason: FinishReason
    usage: Usage


Event = PromptScored | Tokens | Finished  # what a request's stream is made of


@dataclass(frozen=True)
class PeerStatus:
    """One prefill as a decode pod sees it. ``state``: connecting, agreed, refused or lost."""

    address: str
    epoch: str
    state: str
    reason: str = ""
    agreement_digest: str = ""
    quarantined_attempts: int = 0


@dataclass(frozen=True)
class PoolStatus:
    """Item counts of one index space."""

    space: str
    total: int
    free: int
    held: int
    quarantined: int


def pool_statuses(occupancy: Iterable[Occupancy]) -> tuple[PoolStatus, ...]:
    return tuple(
        PoolStatus(o.space.value, o.total, o.free, o.held, o.quarantined) for o in occupancy
    )


@dataclass(frozen=True)
class PrefillStatus:
    """Answer of ``Prefill.GetStatus``. ``paired`` counts decode epochs, ``attempts`` also draining ones."""

    epoch: Epoch
    ready: bool
    reason: str
    queued: int
    running: int
    paired: int
    attempts: int
    pools: tuple[PoolStatus, ...] = ()


@dataclass(frozen=True)
class DecodeStatus:
    """Answer of ``Decode.GetStatus``."""

    epoch: Epoch
    ready: bool
    reason: str
    queued: int
    running: int
    max_model_tokens: int  # 0 = the pod states no limit
    peers: tuple[PeerStatus, ...] = ()
    pools: tuple[PoolStatus, ...] = ()
    retractions: int = 0  # running requests taken off for want of memory, since the start


@dataclass(frozen=True)
class PodLayout:
    """Answer of ``GetLayout`` of either role."""

    layout: Layout
    epoch: Epoch
    fingerprint: str


@dataclass(frozen=True)
class PairReport:
    """Answer of ``Decode.Pair``: handshake plus canary, in full. ``failure`` is the canary's."""

    agreed: bool
    agreement_digest: str
    prefill_epoch: Epoch
    mismatches: tuple[Mismatch, ...]
    canary_passed: bool
    canary_s: float
    components: tuple[Moved, ...] = ()
    failure: SluiceError | None = None
