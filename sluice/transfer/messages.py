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
    measure: bool = False  # write one component after the other, and say how long each took


@dataclass(frozen=True)
class Moved:
    """What of one component crossed. ``digest`` and ``seconds`` (on the wire) only when asked for."""

    component: str
    rows: int
    num_bytes: int
    digest: bytes = b""
    seconds: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """0 when it was not measured."""
        return self.num_bytes / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Timings:
    """Where the time to a first token went, in seconds.

    In ``AttemptComplete``: prefill's share on its clock, the first three. In what decode says: all of it on decode's
    clock, and queue + prefill + transfer + adopt + first_decode == ttft.
    """

    queue_s: float = 0.0
    prefill_s: float = 0.0
    transfer_s: float = 0.0  # after the last chunk's compute; prefill counts to every handle done
    adopt_s: float = 0.0  # rows and digests are checked
    first_decode_s: float = 0.0  # until decode's engine has emitted the first token
    ttft_s: float = 0.0
    prefill_queue_s: float = 0.0  # of queue_s, the wait on prefill
    wire_s: float = 0.0  # of transfer_s, to every handle done

    @property
    def parts(self) -> tuple[float, ...]:
        """In order: queue, prefill, transfer, adopt, first decode."""
        return (
            self.queue_s,
            self.prefill_s,
            self.transfer_s,
            self.adopt_s,
            self.first_decode_s,
        )


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
    transport: str = ""  # what the data plane writes the peer's memory with, where it can tell
