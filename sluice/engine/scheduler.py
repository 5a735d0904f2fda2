"""Who computes next: FIFO admission against promised memory, running requests first, prompts in
chunks.

Fairness: running requests take turns when the token budget is short, and a quarter of the budget
(at least one token) is kept for prompts, so neither can starve the other. The queue's head waits
until it fits; nobody overtakes it.
"""

from __future__ import annotations

from collections import deque

from sluice.config import EngineConfig
from sluice.engine.batch import DecodeWork, PrefillWork, StepPlan
from sluice.engine.request import ActiveRequest, Status
from sluice.engine.window import draft_window_tokens, window_floor
from sluice.errors import BadRequest, Overloaded
from sluice.pools.memory import Memory
from sluice.types import Role

PREFILL_SHARE = (
    4  # prompts get at least 1/4 of the token budget: first tokens keep coming under load
)


class Scheduler:
    """Lists of requests by status, and the memory they hold. Knows nothing of tokens' values or of
    outputs.
    """

    def __init__(self, role: Role, memory: Memory, config: EngineConfig, draft_steps: int) -> None:
        self._role = role
        self._memory = memory
        self._config = config
        self._draft_steps = draft_steps
        self._components = memory.components()
        self._draft_window_tokens = draft_window_tokens(self._components)
        self._queue: deque[ActiveRequest] = deque()
        self._reserved: list[ActiveRequest] = []
        self._prefilling: list[ActiveRequest] = []
        self._running: deque[ActiveRequest] = deque()

    @property
    def num_queued(self) -> int:
        return len(self._queue)

    @property
    def num_computing(self) -> int:
        return len(self._prefilling) + len(self._running)

    def enqueue(self, request: ActiveRequest) -> None:
        """Raises ``BadRequest`` for what an empty memory can't hold, ``Overloaded`` for a full
        queue.
        """
        promise = self._promised_tokens(request)
        if not self._memory.could_ever_open(promise):
            raise BadRequest(
                f"state of {promise} tokens doesn't fit even this pod's empty memory",
                field="max_tokens",
                remedy="shorten the request, or give the pod more pages",
            )
        if len(self._queue) >= self._config.max_queue:
            raise Overloaded(
                f"{len(self._queue)} requests wait, the limit is {self._config.max_queue}",
                stage="queue",
                remedy="try again later or on another pod",
            )
        self._queue.append(request)

    def admit(self) -> list[ActiveRequest]:
        """Admit from the queue's head while it fits: reservations (decode) or prompts."""
        admitted: list[ActiveRequest] = []
        while self._queue and self._computes_soon < self._config.max_running:
            request = self._queue[0]
            promise = self._promised_tokens(request)
            if not self._memory.can_open(promise):
                break
            self._queue.popleft()
            tables = self._memory.open(request.request_id, promise)
            tables.draft_valid_from = max(0, request.prompt_tokens - self._draft_window_tokens)
            if self._role is Role.DECODE:
                request.admit(Status.RESERVED, tables)
                self._reserved.append(request)
                self._extend(request, request.prompt_tokens, request.prompt_tokens)
            else:
                request.admit(Status.PREFILLING, tables)
                self._prefilling.append(request)
            admitted.append(request)
        return admitted

    def schedule(self) -> StepPlan:
        """The next step's work, with items mapped for every position it writes. Empty when there is
        nothing to do.
        """
        budget = self._config.max_batch_tokens
        kept = max(1, budget // PREFILL_SHARE) if self._prefilling else 0
        decodes = self._plan_decodes(budget - kept)
        used = sum(work.num_tokens for work in decodes)
        return StepPlan(decodes, self._plan_prefills(max(kept, budget - used)))

    def start_running(self, request: ActiveRequest) -> None:
        """A prompt is complete here (aggregated) or was adopted (decode)."""
        self._forget(request)
        request.move(Status.RUNNING)
        self._running.append(request)

    def hold(self, request: ActiveRequest) -> None:
        """Prefill role: compute no more, keep the items until they are released."""
        request.move(Status.HELD)
        self._forget(request)

    def quarantine(self, request: ActiveRequest) -> None:
        request.move(Status.QUARANTINED)
        self._forget(request)
        self._memory.quarantine(request.held_tables)

    def close(self, request: ActiveRequest) -> None:
        """Give back everything, from any status but CLOSED."""
        request.move(Status.CLOSED)
        self._forget(request)
        if request.tables is not None:
            self._memory.close(request.tables)
            request.tables = None

    @property
    def _computes_soon(self) -> int:
        """A reservation is a promise to run, so it counts against ``max_running``."""
        return len(self._reserved) + self.num_computing

    def _promised_tokens(self, request: ActiveRequest) -> int:
        """Positions the request may reach. Drafts are capped near the end, so verification never
        overshoots.
        """
        if self._role is Role.PREFILL:
            return request.prompt_tokens
        return request.prompt_tokens + request.request.sampling.max_tokens

    def _extend(self, request: ActiveRequest, num_tokens: int, committed: int) -> None:
        live_from = window_floor(self._components, committed)
        self._memory.extend(request.held_tables, num_tokens, live_from)

    def _plan_decodes(self, budget: int) -> tuple[DecodeWork, ...]:
        works: list[DecodeWork] = []
        used = 0
        for request in self._running:
            drafts = self._drafts_of(request)
            if works and used + drafts + 1 > budget:
                break
            tables = request.held_tables
            self._extend(request, tables.kv_len + drafts + 1, tables.kv_len)
            newest = request.output[-1]
            sampling = request.request.sampling
            works.append(DecodeWork(request.request_id, tables, newest, drafts, sampling))
            used += drafts + 1
        if len(works) < len(self._running):
            self._running.rotate(-len(works))
        return tuple(works)

    def _drafts_of(self, request: ActiveRequest) -> int:
        """A step emits at most drafts + 1 tokens; more than remain would be thrown away."""
        if not request.draft_ready:
            return 0
        return min(self._draft_steps, request.remaining_tokens - 1)

    def _plan_prefills(self, budget: int) -> tuple[PrefillWork, ...]:
        works: list[PrefillWork] = []
        for request in self._prefilling:
            if budget == 0:
                break
            tables, prompt = request.held_tables, request.request.prompt
            start = tables.kv_len
            stop = min(len(prompt), start + budget)
            self._extend(request, stop, stop)
            sampling = request.request.sampling
            works.append(PrefillWork(request.request_id, tables, prompt, start, stop, sampling))
            budget -= stop - start
        return tuple(works)

    def _forget(self, request: ActiveRequest) -> None:
        """Take the request off whichever list it is on."""
        for group in (self._queue, self._reserved, self._prefilling, self._running):
            if request in group:
                group.remove(request)
                return
