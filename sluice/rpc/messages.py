"""What the router and an operator hear from a decode pod, as plain data."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from sluice.errors import SluiceError
from sluice.layout.component import Space
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

_ANY_EPOCH = Epoch("")


@dataclass(frozen=True)
class GenerateCall:
    """One attempt at one request on one pair. ``timeout_s`` is what is left of the deadline.

    The epochs and the digest are what the caller believes about the pair; empty = it doesn't care.
    """

    request_id: RequestId
    attempt_id: AttemptId
    prefill_address: str
    prompt: tuple[int, ...]
    sampling: Sampling
    timeout_s: float
    decode_epoch: Epoch = _ANY_EPOCH
    prefill_epoch: Epoch = _ANY_EPOCH
    agreement_digest: str = ""


@dataclass(frozen=True)
class Tokens:
    """New tokens, in order. ``accepted_drafts`` and ``logprobs`` as in `sluice.types.TokenEvent`; ``timings`` with
    the first.
    """

    token_ids: tuple[int, ...]
    accepted_drafts: int | None = None
    logprobs: tuple[Logprobs, ...] = ()
    timings: Timings | None = None


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


_NUMBERED_BY_SLOT = (Space.RING_ROW, Space.STATE_ROW)


@dataclass(frozen=True)
class PoolComponent:
    """A component whose rows a space numbers, and the bytes its buffers take, whoever uses them."""

    name: str
    num_bytes: int


@dataclass(frozen=True)
class PoolStatus:
    """Item counts of one index space; the four states add up to ``total``."""

    space: str
    total: int
    free: int
    held: int
    quarantined: int
    cached: int = 0
    components: tuple[PoolComponent, ...] = ()


def pool_statuses(
    occupancy: Iterable[Occupancy], layout: Layout | None = None
) -> tuple[PoolStatus, ...]:
    """With a ``layout``, each space also names its components."""
    return tuple(
        PoolStatus(
            o.space.value,
            o.total,
            o.free,
            o.held,
            o.quarantined,
            o.cached,
            () if layout is None else _components_of(layout, o),
        )
        for o in occupancy
    )


def _components_of(layout: Layout, occupancy: Occupancy) -> tuple[PoolComponent, ...]:
    return tuple(
        PoolComponent(component.name, component.num_rows * component.bytes_per_row)
        for component in layout.components
        if component.space is occupancy.space
        or (occupancy.space is Space.REQUEST_SLOT and component.space in _NUMBERED_BY_SLOT)
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
    capacity: int = 0  # requests it computes at once; 0 = not stated


@dataclass(frozen=True)
class CanaryStatus:
    """The last canary of a pair. ``failure`` is empty when it passed."""

    finished_unix_s: float
    seconds: float
    failure: str = ""
    transport: str = ""
    components: tuple[Moved, ...] = ()


@dataclass(frozen=True)
class PeerStatus:
    """One prefill as a decode pod sees it. ``state``: connecting, agreed, refused, lost or draining.

    ``prefill`` is what it said of itself with its last ping.
    """

    address: str
    epoch: str
    state: str
    reason: str = ""
    agreement_digest: str = ""
    quarantined_attempts: int = 0
    canary: CanaryStatus | None = None
    prefill: PrefillStatus | None = None


@dataclass(frozen=True)
class Acceptance:
    """What drafting is worth: the mean tokens of the last ``steps`` verify steps."""

    drafts: bool = False  # a draft is configured
    recent_tokens: float = 0.0
    steps: int = 0
    collapsed: bool = False


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
    acceptance: Acceptance = field(default_factory=Acceptance)
    capacity: int = 0  # requests it computes at once; 0 = not stated


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
