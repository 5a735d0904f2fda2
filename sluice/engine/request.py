"""One request inside the engine: its status, the table of legal moves, and what it has so far."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from sluice.engine.outputs import ChunkReady
from sluice.errors import IllegalTransition
from sluice.grammar.matcher import Matcher
from sluice.pools.backup import StateBackup
from sluice.pools.base import RequestTables
from sluice.spec.steering import Steering, needs_steering
from sluice.types import FinishReason, Logprobs, PromptLogprobs, Request, RequestId


class Status(Enum):
    """Where in its life a request is; comments name what it holds."""

    QUEUED = "queued"  # nothing
    RESERVED = "reserved"  # decode: items for the whole prompt, being written by the peer
    PREFILLING = "prefilling"  # items for the chunks so far
    RUNNING = "running"  # items for prompt and output
    RETRACTED = "retracted"  # no items, a backup on the host; runs again when memory is free
    HELD = "held"  # prefill: computes nothing, items kept until release()
    QUARANTINED = "quarantined"  # decode: items out of use, the peer may still write them
    CLOSED = "closed"  # nothing


TRANSITIONS: dict[Status, frozenset[Status]] = {
    Status.QUEUED: frozenset({Status.RESERVED, Status.PREFILLING, Status.CLOSED}),
    Status.RESERVED: frozenset({Status.RUNNING, Status.QUARANTINED, Status.CLOSED}),
    Status.PREFILLING: frozenset({Status.RUNNING, Status.HELD, Status.CLOSED}),
    Status.RUNNING: frozenset({Status.RETRACTED, Status.CLOSED}),
    Status.RETRACTED: frozenset({Status.RUNNING, Status.CLOSED}),
    Status.HELD: frozenset({Status.CLOSED}),
    Status.QUARANTINED: frozenset({Status.CLOSED}),
    Status.CLOSED: frozenset(),
}

OnChunk = Callable[[ChunkReady], None]


@dataclass(eq=False)  # lists of requests are searched by identity
class ActiveRequest:
    """Mutable record of one request; only the step thread touches it."""

    request: Request
    stop_ids: frozenset[int]
    on_chunk: OnChunk | None = None
    status: Status = Status.QUEUED
    tables: RequestTables | None = None
    output: list[int] = field(default_factory=list)
    steering: Steering | None = None  # what shapes its logits besides the model, if anything
    prompt_scores: list[Logprobs] = field(default_factory=list)  # of its second token onwards
    number: int = 0  # order of arrival: the older of two is never taken off for the younger
    promised_tokens: int = 0  # positions that memory is promised for
    backup: StateBackup | None = None  # while retracted
    cached_tokens: int = 0  # prompt rows whose state came from a kept prefix
    announced_tokens: int = 0  # prefill: rows that on_chunk has heard of
    draft_ready: bool = False  # draft.hidden belongs to the newest committed position
    arrived_s: float = field(default_factory=time.monotonic)
    admitted_s: float = 0.0

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def remaining_tokens(self) -> int:
        return self.request.sampling.max_tokens - len(self.output)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Of the whole prompt, when asked for and computed."""
        wanted = self.request.sampling.prompt_logprobs is not None
        return (None, *self.prompt_scores) if wanted else None

    @property
    def held_tables(self) -> RequestTables:
        assert self.tables is not None, f"{self.status} holds no items"
        return self.tables

    def move(self, to: Status) -> None:
        """Change status, or raise ``IllegalTransition`` and change nothing."""
        if to not in TRANSITIONS[self.status]:
            raise IllegalTransition(
                f"request {self.request_id}: {self.status.value} -> {to.value}", stage="engine"
            )
        self.status = to

    def admit(self, to: Status, tables: RequestTables) -> None:
        self.move(to)
        self.tables = tables
        self.admitted_s = time.monotonic()

    def append(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Take new tokens up to the first stop token or the length limit; what was taken, and why
        it ended.
        """
        reason: FinishReason | None = None
        taken = token_ids[: self.remaining_tokens]
        for i, token in enumerate(taken):
            if token in self.stop_ids:
                taken, reason = taken[: i + 1], FinishReason.STOP
                break
        self.output.extend(taken)
        if reason is None and self.remaining_tokens == 0:
            reason = FinishReason.LENGTH
        return taken, reason


def new_request(
    request: Request,
    eos_ids: frozenset[int],
    on_chunk: OnChunk | None = None,
    matcher: Matcher | None = None,
) -> ActiveRequest:
    """A queued request; ``matcher`` is that of its grammar, where tokens are chosen."""
    sampling = request.sampling
    stop_ids = frozenset(sampling.stop_token_ids)
    if sampling.grammar is not None or not sampling.ignore_eos:
        stop_ids |= eos_ids  # a grammar's end is an end, whatever else was asked for
    active = ActiveRequest(request, stop_ids, on_chunk)
    if needs_steering(sampling):
        active.steering = Steering(sampling, request.prompt, active.output, stop_ids, matcher)
    return active
