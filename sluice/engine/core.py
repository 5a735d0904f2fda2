"""The step loop's heart: schedule -> execute -> apply, and the commands that change a request's
fate between steps.

Everything here runs on one thread. ``facade`` gives it a queue in and callbacks out; tests call it
directly.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.batch import (
    DecodeResult,
    DecodeWork,
    PrefillResult,
    PrefillWork,
    StepPlan,
    StepResult,
)
from sluice.engine.describe import DraftIdentity, describe_layout
from sluice.engine.limits import RequestLimits
from sluice.engine.outputs import (
    ChunkReady,
    EngineStats,
    Failed,
    Output,
    Prefilled,
    PrefillOutcome,
    Reservation,
    Reserved,
)
from sluice.engine.prefix import PrefixStore
from sluice.engine.request import ActiveRequest, OnChunk, Status, new_request
from sluice.engine.runner import Runner
from sluice.engine.scheduler import Scheduler
from sluice.engine.window import draft_window_tokens
from sluice.errors import (
    Aborted,
    BadRequest,
    ConfigError,
    IllegalTransition,
    InternalError,
    RankLost,
    SluiceError,
)
from sluice.grammar.compiler import NO_GRAMMARS, Grammars
from sluice.grammar.matcher import Matcher
from sluice.layout.layout import Layout, Parallelism
from sluice.models.base import DraftModel, ModelInfo, TargetModel
from sluice.models.dspark.model import DSparkDraft
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.backup import check_backup
from sluice.pools.memory import Memory
from sluice.spec.build import build_drafter, draft_digest
from sluice.spec.commit import CommittedTarget, check_chain, commit_by_length
from sluice.types import FinishReason, Logprobs, Request, RequestId, Role, TokenEvent

log = logging.getLogger(__name__)


class EngineCore:
    """One model, one memory, one role. ``step()`` moves every request that can move; ``drain()``
    says what came of it.

    ``draft`` is used when ``spec.steps > 0``; without one every step verifies a single token.
    """

    def __init__(
        self,
        role: Role,
        target: TargetModel,
        draft: DraftModel | DSparkDraft | None,
        memory: Memory,
        spec: SpecConfig,
        config: EngineConfig,
        pool: PoolConfig,
        grammars: Grammars = NO_GRAMMARS,
        parallel: Parallel = SINGLE,
    ) -> None:
        if role is not Role.PREFILL:  # which never retracts: peers read its items
            check_backup(memory)
        check_chain(spec)
        self.role = role
        self.grammars = grammars  # compiles on any thread
        self._target = target
        self._memory = memory
        self._spec = spec
        self._pool = pool
        self._parallelism = Parallelism(parallel.size, pool.context, parallel.rank)
        drafter, self._draft_identity = None, None
        if draft is not None and spec.steps > 0:
            drafter = build_drafter(draft, memory, spec.steps)
            digest = draft_digest(draft, target.info)
            self._draft_identity = DraftIdentity(drafter.algorithm, digest)
        self._drafts = drafter is not None
        window_tokens = draft_window_tokens(memory.components())
        prefixes = PrefixStore.of(role, memory, config, spec.verify_tokens)
        committed = CommittedTarget(target, memory, prefixes.grid if prefixes else None)
        self._runner = Runner(committed, target.logits, drafter, memory, window_tokens, parallel)
        self._scheduler = Scheduler(role, memory, config, spec.steps if drafter else 0, prefixes)
        self._limits = RequestLimits.of(target.info, config)
        self._eos_ids = frozenset(target.info.eos_token_ids)
        self._requests: dict[RequestId, ActiveRequest] = {}
        self._outputs: list[Output] = []
        self._steps = 0

    @property
    def info(self) -> ModelInfo:
        return self._target.info

    @property
    def memory(self) -> Memory:
        return self._memory

    def layout(self) -> Layout:
        """Everything negotiation compares about this pod."""
        components, draft = self._memory.components(), self._draft_identity
        layout = describe_layout(self.role, self.info, self._pool, self._spec, components, draft)
        return replace(layout, parallelism=self._parallelism)

    # ---- commands, between steps

    def submit(
        self, request: Request, on_chunk: OnChunk | None = None, matcher: Matcher | None = None
    ) -> None:
        """Queue a request: to generate (aggregated), prefill (``on_chunk`` is called per chunk) or
        reserve (decode). Its grammar is compiled here unless its ``matcher`` comes along.

        Raises ``BadRequest`` (limits, id in use) or ``Overloaded`` (queue full); then nothing was
        queued.
        """
        self._limits.check(request)
        if (on_chunk is not None) != (self.role is Role.PREFILL):
            raise ConfigError(f"a {self.role.value} engine can't take this kind of request")
        if request.request_id in self._requests:
            raise BadRequest(f"request id {request.request_id} is in use", field="request_id")
        if request.sampling.grammar is not None and matcher is None:
            matcher = self.grammars.matcher(request.sampling.grammar)
        active = new_request(request, self._eos_ids, on_chunk, matcher)
        self._scheduler.enqueue(active)
        self._requests[request.request_id] = active

    def adopt(
        self,
        request_id: RequestId,
        first_token: int,
        draft_valid: bool = True,
        first_logprobs: Logprobs | None = None,
    ) -> None:
        """Decode: the reservation's state has arrived. Its first output is ``first_token``.

        ``draft_valid`` False: no draft state came along; the first step runs without a draft and
        drafting resumes on what it leaves. Raises ``IllegalTransition`` unless the request is
        reserved, ``InternalError`` without logprobs that it asked for.
        """
        request = self._known(request_id)
        if request.request.sampling.logprobs is not None and first_logprobs is None:
            raise InternalError("the first token came without its logprobs", stage="adopt")
        self._scheduler.start_running(request)
        tables = request.held_tables
        tables.kv_len = request.prompt_tokens
        request.draft_ready = draft_valid
        if not draft_valid:
            tables.draft_valid_from = request.prompt_tokens
        self._go_on(request, self._emit(request, DecodeResult.first(first_token, first_logprobs)))

    def abort(self, request_id: RequestId) -> None:
        """Stop computing for a request. It fails with ``Aborted`` if it was queued or computing,
        else nothing happens.

        In the prefill role, and for a decode reservation, items stay held until ``release``.
        """
        request = self._requests.get(request_id)
        if request is not None and request.status in _ABORTABLE:
            self._fail(request, Aborted("aborted", stage=request.status.value))

    def cancel(self, request_id: RequestId) -> None:
        """Nobody waits for the request's reservation or prefill any more.

        A reservation was never shown to anybody, so its items go back; a prefill's are kept, as by
        ``abort``.
        """
        self.abort(request_id)
        request = self._requests.get(request_id)
        if request is not None and request.status is Status.RESERVED:
            self._close(request)

    def release(self, request_id: RequestId) -> None:
        """Give back what a request that computes nothing holds; also takes a queued request off the
        queue.

        Unknown ids are fine (released already). Raises ``IllegalTransition`` while the request
        computes.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        if request.status in (Status.PREFILLING, Status.RUNNING, Status.RETRACTED):
            raise IllegalTransition(
                f"release of request {request_id}, which is {request.status.value}",
                stage="engine",
                remedy="abort it first",
            )
        self._close(request)

    def quarantine(self, request_id: RequestId) -> None:
        """Take a reservation's items out of use while the peer may write them; ``release`` ends it."""
        self._scheduler.quarantine(self._known(request_id))

    def retract(self, request_id: RequestId) -> None:
        """Take a running request off now, as under memory pressure: back up its state on the host and
        free its items.

        It comes back as soon as it fits, before anybody new, and goes on as if nothing had happened.
        Raises ``IllegalTransition`` unless the request is running.
        """
        self._scheduler.retract(self._known(request_id))

    def shutdown(self, reason: SluiceError) -> None:
        """Fail every queued and computing request. What a peer may still read or write stays as it
        is.
        """
        for request in list(self._requests.values()):
            if request.status in _ABORTABLE:
                self._fail(request, reason)

    # ---- the loop

    def step(self) -> bool:
        """Admit, plan, run, apply. False when there is nothing to do until the next command."""
        for request in self._scheduler.admit():
            if request.status is Status.RESERVED:
                reservation = Reservation(request.request, request.held_tables)
                self._outputs.append(Reserved(request.request_id, reservation))
        given_up = self._scheduler.take_given_up()
        for request, error in given_up:
            self._fail(request, error)
        plan = self._scheduler.schedule()
        if not plan:
            if self._pool.fill is not None:  # debug: recount the pools whenever there is time
                self._memory.check()
            return bool(given_up)
        self._steps += 1
        try:
            result = self._runner.execute(plan)
        except RankLost:  # no request's fault: this engine is done for
            raise
        except Exception as error:
            log.exception("step %d failed: %s", self._steps, plan.describe())
            self._fail_batch(plan, error)
            return True
        self._apply(plan, result)
        return True

    def drain(self) -> list[Output]:
        """Outputs since the last call, in order."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def stats(self) -> EngineStats:
        queued, computing, retracted = self._scheduler.counts
        return EngineStats(
            queued=queued,
            running=computing,
            waiting=len(self._requests) - queued - computing - retracted,
            steps=self._steps,
            occupancy=self._memory.occupancy(),
            retracted=retracted,
            retractions=self._scheduler.num_retractions,
            prefix_bytes=self._scheduler.prefix_bytes,
        )

    # ---- applying results

    def _apply(self, plan: StepPlan, result: StepResult) -> None:
        for work, decoded in zip(plan.decodes, result.decodes, strict=True):
            self._apply_decode(work, decoded)
        for chunk, prefilled in zip(plan.prefills, result.prefills, strict=True):
            request = self._requests[chunk.request_id]
            if prefilled.failure is not None:
                self._fail(request, prefilled.failure)
                continue
            chunk.tables.kv_len = chunk.stop
            request.prompt_scores += prefilled.prompt_logprobs
            self._scheduler.keep_chunk(chunk)
            if not chunk.final:
                self._memory.advance(chunk.tables, chunk.stop)
            if self.role is Role.PREFILL:
                self._hand_over(request, chunk, prefilled)
            elif prefilled.first_token is not None:
                self._scheduler.start_running(request)
                request.draft_ready = self._drafts
                first = DecodeResult.first(prefilled.first_token, prefilled.first_logprobs)
                self._go_on(request, self._emit(request, first))

    def _apply_decode(self, work: DecodeWork, decoded: DecodeResult) -> None:
        request, start = self._requests[work.request_id], work.tables.kv_len
        if decoded.failure is not None:
            self._fail(request, decoded.failure)
            return
        commit_by_length(work.tables, start, decoded.accepted)
        request.draft_ready = self._drafts
        reason = self._emit(request, decoded)
        self._scheduler.keep_step(request, start, decoded.reached)
        self._go_on(request, reason)

    def _emit(self, request: ActiveRequest, result: DecodeResult) -> FinishReason | None:
        """Append and tell; why the request has ended, if it has."""
        first = self.role is Role.AGGREGATED and not request.output
        taken, reason = request.append(result.token_ids)
        event = TokenEvent(
            request.request_id,
            taken,
            reason,
            result.accepted if result.drafted else None,
            result.logprobs[: len(taken)],
            request.prompt_logprobs if first else None,
        )
        self._outputs.append(event)
        return reason

    def _go_on(self, request: ActiveRequest, reason: FinishReason | None) -> None:
        """Or end: a finished request's state is given back, the others' windows move on."""
        if reason is not None:
            self._close(request)
            return
        tables = request.held_tables
        assert tables.kv_len == request.prompt_tokens + len(request.output) - 1
        self._memory.advance(tables, tables.kv_len)

    def _hand_over(
        self, request: ActiveRequest, chunk: PrefillWork, prefilled: PrefillResult
    ) -> None:
        """Prefill role: announce the chunk; on the last one, stop computing and keep the items."""
        assert request.on_chunk is not None
        first_token = prefilled.first_token
        prefill_s = time.monotonic() - request.admitted_s
        if chunk.final:
            self._scheduler.hold(request)
        try:
            request.on_chunk(
                ChunkReady(
                    request_id=request.request_id,
                    start=request.announced_tokens,
                    stop=chunk.stop,
                    final=chunk.final,
                    first_token=first_token,
                    tables=chunk.tables,
                    fence=self._runner.fence(),
                )
            )
        except Exception as error:
            log.exception("on_chunk of request %s failed", request.request_id)
            self._fail(request, InternalError.of(error, "on_chunk"))
            return
        request.announced_tokens = chunk.stop
        if first_token is not None:
            _, reason = request.append((first_token,))
            outcome = PrefillOutcome(
                first_token,
                reason,
                request.admitted_s - request.arrived_s,
                prefill_s,
                request.cached_tokens,
                prefilled.first_logprobs,
                request.prompt_logprobs,
            )
            self._outputs.append(Prefilled(request.request_id, outcome))

    # ---- endings

    def _fail_batch(self, plan: StepPlan, error: Exception) -> None:
        for request_id in plan.request_ids:
            self._fail(self._requests[request_id], InternalError.of(error, "step"))

    def _fail(self, request: ActiveRequest, error: SluiceError) -> None:
        """End a request with an error; a prefill that has computed keeps its items, since a peer
        may be reading.
        """
        if self.role is Role.PREFILL and request.status is Status.PREFILLING:
            self._scheduler.hold(request)
        elif request.status is not Status.HELD:
            self._close(request)
        self._outputs.append(Failed(request.request_id, error))

    def _close(self, request: ActiveRequest) -> None:
        self._scheduler.close(request)
        del self._requests[request.request_id]

    def _known(self, request_id: RequestId) -> ActiveRequest:
        request = self._requests.get(request_id)
        if request is None:
            raise IllegalTransition(f"request {request_id} is not here", stage="engine")
        return request


_ABORTABLE = (Status.QUEUED, Status.PREFILLING, Status.RUNNING, Status.RETRACTED)
