"""What prefill and decode say to each other about one attempt, as plain data (protobuf stays in ``rpc``)."""

from __future__ import annotations

from dataclasses import dataclass

from sluice.layout.span import Run
from sluice.types import AttemptId, Epoch, Logprobs, PromptLogprobs, RequestId, Sampling


@dataclass(frozen=True)
class ComponentGrant:
    """Permission to write into these rows of one component, in logical order."""

    component: str
    runs: tuple[Run, ...]


@dataclass(frozen=True)
class AttemptStart:
    """Decode's opening word. ``timeout_s`` is what is left of the request's one deadline."""

    attempt_id: AttemptId
    request_id: RequestId
    decode_epoch: Epoch
    prefill_epoch: Epoch
    agreement_digest: str
    prompt: tuple[int, ...]
    sampling: Sampling
    timeout_s: float
    have_tokens: int
    grants: tuple[ComponentGrant, ...]
    want_digests: bool


@dataclass(frozen=True)
class Moved:
    """What of one component crossed. ``digest`` is empty unless it was asked for."""

    component: str
    rows: int
    num_bytes: int
    digest: bytes = b""


@dataclass(frozen=True)
class Timings:
    """Prefill's share of a request's time, in seconds."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0  # from the last chunk's compute to every handle done


@dataclass(frozen=True)
class AttemptComplete:
    """Prefill's last word: every handle of this attempt is done. Logprobs come when they were asked for."""

    attempt_id: AttemptId
    prefill_epoch: Epoch
    first_token: int
    prompt_tokens: int
    cached_tokens: int
    timings: Timings
    components: tuple[Moved, ...]
    first_logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
