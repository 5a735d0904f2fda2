"""Who computes next: FIFO admission against promised memory, running requests first, prompts in
chunks.

Fairness: running requests take turns when the token budget is short, and a quarter of the budget
(at least one token) is kept for prompts, so neither can starve the other. The queue's head waits
until it fits; nobody overtakes it.

Memory: with ``promised_output`` below 1 a running request may outgrow its promise. Then the youngest
running ones are retracted until it fits; they come back, oldest first, before anybody is admitted.
No deadlock: the oldest running request is never taken off, fits into an empty memory by itself, and
everybody else either is retracted for it or (prompts, reservations) never needs more than promised.
"""

from __future__ import annotations

import math
import sys
from bisect import insort
from collections import deque

from sluice.config import EngineConfig
from sluice.engine.batch import DecodeWork, PrefillWork, StepPlan
from sluice.engine.prefix import MISS, PrefixHit, PrefixStore
from sluice.engine.request import ActiveRequest, Status
from sluice.engine.window import draft_window_tokens, window_floor
from sluice.errors import BadRequest, ConfigError, InternalError, Overloaded, SluiceError
from sluice.pools.backup import EarlierState, back_up, backup_bytes, check_settled, restore
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory
from sluice.types import Role

# Prompts get at least 1/4 of the token budget: first tokens keep coming under load.
PREFILL_SHARE = 4


class Scheduler:
    """Lists of requests by status, and the memory they hold. Knows nothing of tokens' values or of
    outputs.
    """

    def __init__(
        self,
        role: Role,
        memory: Memory,
        config: EngineConfig,
        draft_steps: int,
        prefixes: PrefixStore | None = None,
    ) -> None:
        self._role = role
        self._memory = memory
        self._config = config
        self._draft_steps = draft_steps
        self._prefixes = prefixes
        self._components = memory.components()
        self._draft_window_tokens = draft_window_tokens(self._components)
        self._queue: deque[ActiveRequest] = deque()
        self._reserved: list[ActiveRequest] = []
        self._prefilling: list[ActiveRequest] = []
        self._running: deque[ActiveRequest] = deque()
        self._retracted: list[ActiveRequest] = []  # oldest first
        self._arrivals = 0
        self._given_up: list[tuple[ActiveRequest, SluiceError]] = []
        self.num_retractions = 0
        if not 0 <= config.promised_output <= 1:
            raise ConfigError(f"promised_output is {config.promised_output}, must be in [0, 1]")

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests that are queued, that compute, and that are retracted."""
        return len(self._queue), len(self._prefilling) + len(self._running), len(self._retracted)

    @property
    def prefix_bytes(self) -> int:
        """Of state kept for reuse, pages in use included."""
        return 0 if self._prefixes is None else self._prefixes.num_bytes

    def enqueue(self, request: ActiveRequest) -> None:
        """Raises ``BadRequest`` for what an empty memory can't hold, ``Overloaded`` for a full
        queue.
        """
        worst = self._worst_tokens(request)
        if not self._memory.could_ever_open(worst):
            raise BadRequest(
                f"state of {worst} tokens doesn't fit even this pod's empty memory",
                field="max_tokens",
                remedy="shorten the request, or give the pod more pages",
            )
        if len(self._queue) >= self._config.max_queue:
            raise Overloaded(
                f"{len(self._queue)} requests wait, the limit is {self._config.max_queue}",
                stage="queue",
                remedy="try again later or on another pod",
            )
        self._arrivals += 1
        request.number = self._arrivals
        self._queue.append(request)

    def admit(self) -> list[ActiveRequest]:
        """Room for who runs, then who was taken off before, then the queue's head while it fits.

        Returns the newly admitted: reservations (decode) or prompts.
        """
        admitted: list[ActiveRequest] = []
        if not (self._make_room() and self._restore_retracted()):
            return admitted
        while self._queue and self._computes_soon < self._config.max_running:
            request = self._queue[0]
            promise = self._promised_tokens(request)
            hit = self._known_prefix(request)
            if not self._memory.can_open(promise, hit.pages):
                break
            self._queue.popleft()
            tables = self._memory.open(request.request_id, promise, hit.pages)
            request.promised_tokens = promise
            if self._role is Role.DECODE:
                request.admit(Status.RESERVED, tables)
                self._reserved.append(request)
                self._extend(request, request.prompt_tokens, request.prompt_tokens)
            else:
                request.admit(Status.PREFILLING, tables)
                self._prefilling.append(request)
                self._start_behind(request, hit)
            tables.draft_valid_from = max(0, request.prompt_tokens - self._draft_window_tokens)
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

    def keep_chunk(self, chunk: PrefillWork) -> None:
        """A chunk has ended: what it left can serve other prompts."""
        if self._prefixes is not None:
            self._prefixes.keep_chunk(chunk.prompt, chunk.tables)

    def keep_step(self, request: ActiveRequest, start: int, earlier: EarlierState | None) -> None:
        """A decode step has moved a request on from ``start`` tokens: its answer, too, can be the
        beginning of a prompt (the next turn's).
        """
        if self._prefixes is not None:
            prompt, tables = request.request.prompt, request.held_tables
            self._prefixes.keep_step(prompt, request.output, tables, start, earlier)

    def start_running(self, request: ActiveRequest) -> None:
        """A prompt is complete here (aggregated) or was adopted (decode)."""
        self._forget(request)
        request.move(Status.RUNNING)
        self._running.append(request)

    def retract(self, request: ActiveRequest) -> None:
        """Take a running request off: its state goes to the host, its items to everybody.

        Raises ``IllegalTransition`` unless it runs, ``Overloaded`` when the host has no room for its
        state, ``InternalError`` when that is damaged; then it stays as it is.
        """
        if request.status is Status.RUNNING:
            self._check_backup(request.held_tables)
        request.move(Status.RETRACTED)
        tables = request.held_tables
        request.backup = back_up(self._memory, tables)
        self._forget(request)
        self._memory.close(tables)
        request.tables = None
        insort(self._retracted, request, key=_age)
        self.num_retractions += 1

    def take_given_up(self) -> list[tuple[ActiveRequest, SluiceError]]:
        """Requests that can neither go on nor be taken off, and why, since the last call."""
        given_up, self._given_up = self._given_up, []
        return given_up

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
        request.backup = None

    @property
    def _computes_soon(self) -> int:
        """A reservation is a promise to run, so it counts against ``max_running``."""
        return len(self._reserved) + len(self._prefilling) + len(self._running)

    def _worst_tokens(self, request: ActiveRequest) -> int:
        """Positions the request may reach. Drafts are capped near the end, so verification never
        overshoots.
        """
        if self._role is Role.PREFILL:
            return request.prompt_tokens
        return request.prompt_tokens + request.request.sampling.max_tokens

    def _promised_tokens(self, request: ActiveRequest) -> int:
        """Positions to promise now: what is there, one verify step, and a share of what may come."""
        share = math.ceil(self._config.promised_output * request.remaining_tokens)
        so_far = request.prompt_tokens + len(request.output)
        return min(self._worst_tokens(request), so_far + max(share, self._draft_steps + 1))

    def _make_room(self) -> bool:
        """Promise every running request its next step, retracting the youngest where needed.

        False when the only one left must wait for prompts or reservations to end.
        """
        for request in sorted(self._running, key=_age):
            while request.status is Status.RUNNING and not self._has_room(request):
                if not self._retract_youngest():
                    return False
        return True

    def _retract_youngest(self) -> bool:
        """Take off the youngest but the oldest, or of those whose state the host can hold; whether there
        was one.

        Where there is none, somebody who still has room will end and give some back. Where nobody
        has, the youngest is given up: else all would wait for ever.
        """
        refused: list[tuple[ActiveRequest, SluiceError]] = []
        for request in sorted(self._running, key=_age, reverse=True)[:-1]:
            try:
                self.retract(request)
            except Overloaded as error:
                refused.append((request, error))
            except InternalError as error:
                self._given_up.append((request, error))
                return False
            else:
                return True
        others_end = self._reserved or self._prefilling or any(map(self._has_room, self._running))
        if refused and not others_end:
            self._given_up.append(refused[0])
        return False

    def _check_backup(self, tables: RequestTables) -> None:
        check_settled(self._memory, tables)
        held = sum(one.backup.num_bytes for one in self._retracted if one.backup is not None)
        size, limit = backup_bytes(self._memory, tables.kv_len), self._config.backup_bytes
        if held + size > limit:
            raise Overloaded(
                f"request {tables.request_id} needs memory, and {size} bytes of state to back up don't "
                f"fit beside {held} on the host, the limit is {limit}",
                stage="retract",
                remedy="raise backup_bytes or promised_output, or give the pod more pages",
            )

    def _has_room(self, request: ActiveRequest) -> bool:
        """Whether the next step is within the promise, after raising it if it can be."""
        need = self._next_stop(request)
        if need <= request.promised_tokens:
            return True
        for goal in (self._promised_tokens(request), need):
            if self._memory.grow(request.held_tables, goal):
                request.promised_tokens = goal
                return True
        return False

    def _restore_retracted(self) -> bool:
        """Bring back retracted requests while they fit, oldest first. False when some remain.

        They count as running: nobody is admitted while one is off, so they can't be too many.
        """
        while self._retracted:
            request = self._retracted[0]
            promise = self._promised_tokens(request)
            if not self._memory.can_open(promise):
                return False
            self._restore(request, promise)
        return True

    def _restore(self, request: ActiveRequest, promise: int) -> None:
        assert request.backup is not None, "a retracted request has a backup"
        length = request.backup.length
        request.tables = self._memory.open(request.request_id, promise)
        request.promised_tokens = promise
        self._extend(request, length, length)
        restore(self._memory, request.backup, request.tables)
        request.backup = None
        self._forget(request)
        request.move(Status.RUNNING)
        self._running.append(request)

    def _next_stop(self, request: ActiveRequest) -> int:
        """Where the request's next verify step ends."""
        return request.held_tables.kv_len + self._drafts_of(request) + 1

    def _known_prefix(self, request: ActiveRequest) -> PrefixHit:
        """The deepest kept prefix of the prompt that the request can start behind.

        Nothing where the prompt's logprobs are wanted: what is not computed has none.
        """
        if self._prefixes is None or request.request.sampling.prompt_logprobs is not None:
            return MISS
        prompt = request.request.prompt
        # At least one row must run for the first token, and a draft must see its window: rows of a
        # longer prompt's draft window were computed there only if they were that prompt's last too.
        rows = self._draft_window_tokens
        limit = len(prompt) - (rows if 0 < rows < sys.maxsize else 1)
        return self._prefixes.match(prompt, limit)

    def _start_behind(self, request: ActiveRequest, hit: PrefixHit) -> None:
        if self._prefixes is not None and hit.depth > 0:
            self._extend(request, hit.depth, hit.depth)
            self._prefixes.restore(hit, request.held_tables)
            request.cached_tokens = hit.depth

    def _extend(self, request: ActiveRequest, num_tokens: int, committed: int) -> None:
        live_from = window_floor(self._components, committed)
        self._memory.extend(request.held_tables, num_tokens, live_from)

    def _plan_decodes(self, budget: int) -> tuple[DecodeWork, ...]:
        works: list[DecodeWork] = []
        used = 0
        for request in self._running:
            if self._next_stop(request) > request.promised_tokens:
                continue  # waits for memory: see _make_room
            drafts = self._drafts_of(request)
            if works and used + drafts + 1 > budget:
                break
            tables = request.held_tables
            self._extend(request, tables.kv_len + drafts + 1, tables.kv_len)
            newest = request.output[-1]
            sampling, steering = request.request.sampling, request.steering
            works.append(DecodeWork(request.request_id, tables, newest, drafts, sampling, steering))
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
            if self._prefixes is not None:
                stop = self._prefixes.chunk_stop(start, stop)
            self._extend(request, stop, stop)
            work = PrefillWork(
                request_id=request.request_id,
                tables=tables,
                prompt=prompt,
                start=start,
                stop=stop,
                sampling=request.request.sampling,
                steering=request.steering,
            )
            works.append(work)
            budget -= stop - start
        return tuple(works)

    def _forget(self, request: ActiveRequest) -> None:
        """Take the request off whichever list it is on."""
        groups = (
            self._queue,
            self._reserved,
            self._prefilling,
            self._running,
            self._retracted,
        )
        for group in groups:
            if request in group:
                group.remove(request)
                return


def _age(request: ActiveRequest) -> int:
    return request.number
