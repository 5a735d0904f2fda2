"""One prompt from token ids to text: pairs, attempts, detokenising, stop strings."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.router.fleet import Pair
from services.router.lease import Lease, PairSource
from services.router.recorder import Recorder, Watched
from sluice.errors import DeadlineExceeded, NotReady, Overloaded, SluiceError, StaleEpoch
from sluice.rpc.messages import Finished, GenerateCall, PromptScored, Tokens, Usage
from sluice.telemetry.logging import get_logger
from sluice.telemetry.tracing import Tracing
from sluice.text.detokenize import Detokenizer
from sluice.text.stop import StopMatcher
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import AttemptId, FinishReason, PromptLogprobs, RequestId, Sampling

_SAME_PAIR_PAUSE_S = 0.1
_log = get_logger(__name__)


@dataclass(frozen=True)
class Job:
    """One answer to one prompt. ``deadline`` is event-loop time, the same for every attempt.

    ``include_stop`` leaves what stopped the answer in its text: a stop string, or a stop token that
    is no special one. Special tokens among ``shown`` stand in the text. With ``prompt_only`` what
    follows the prompt is thrown away: a pod can't read a prompt without writing a token.
    """

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling
    stops: tuple[str, ...]
    deadline: float
    include_stop: bool = False
    shown: frozenset[int] = frozenset()
    prompt_only: bool = False


@dataclass(frozen=True)
class End:
    """How the answer ended. ``usage`` lacks cached tokens when ``partial``: a stop string cut it."""

    reason: FinishReason
    usage: Usage
    partial: bool = False


@dataclass(frozen=True)
class Piece:
    """Text that is safe to send, and the steps that made it. The last piece has an ``end``.

    ``scored`` is the prompt's logprobs, in the first piece, when they were asked for.
    """

    text: str
    steps: tuple[Tokens, ...]
    end: End | None = None
    scored: PromptLogprobs | None = None


class TextGenerator:
    """Runs jobs on pairs. Retries only while nothing has been handed out."""

    def __init__(
        self,
        pairing: PairSource,
        tokenizer: ModelTokenizer,
        retries: int,
        recorder: Recorder,
        tracing: Tracing,
    ) -> None:
        self._pairing = pairing
        self._tokenizer = tokenizer
        self._retries = retries
        self._recorder = recorder
        self._tracing = tracing

    async def run(self, job: Job, *, hold: bool) -> AsyncGenerator[Piece]:
        """Pieces of the answer. ``hold`` hands all of them out at the end, so that a failure at any
        point can be tried again. Raises what the last attempt raised; closing cancels it at once."""
        with (
            self._recorder.answer(job.request_id, len(job.prompt)) as watched,
            self._tracing.span("router.answer", **{"sluice.request_id": job.request_id}),
        ):
            async with aclosing(self._run(job, watched, hold=hold)) as pieces:
                async for piece in pieces:
                    yield piece

    async def _run(self, job: Job, watched: Watched, *, hold: bool) -> AsyncGenerator[Piece]:
        tried: list[Pair] = []
        failures = 0
        while True:
            handed_out = False
            held: list[Piece] = []
            async with self._pairing.lease(job.prompt, job.deadline, avoid=tried) as lease:
                repeated = lease.pair in tried
                try:
                    with self._tracing.span("router.attempt", **_where(lease.pair)):
                        async with aclosing(self._attempt(job, lease, watched)) as pieces:
                            async for piece in pieces:
                                if hold:
                                    held.append(piece)
                                    continue
                                handed_out = True
                                yield piece
                except SluiceError as error:
                    lease.failed(error)
                    tried.append(lease.pair)
                    failures += not _refused(error)
                    again = not (handed_out or repeated) and self._may_retry(error, tried, failures)
                    watched.attempt_failed(error, again=again)
                    if not again:
                        raise
                    _log.warning("attempt_retried", error=str(error), code=error.code)
                    if not self._others(tried):
                        await asyncio.sleep(_SAME_PAIR_PAUSE_S)
                else:
                    lease.succeeded()
                    for piece in held:
                        yield piece
                    return

    def _may_retry(self, error: SluiceError, tried: list[Pair], failures: int) -> bool:
        """A pod that refuses before any work costs nothing: every other pair may be asked, each once."""
        if not (error.retryable and self._retries) or failures > self._retries:
            return False
        # A full pair stays full for longer than a retry takes; only another one can help.
        return self._others(tried) or not isinstance(error, Overloaded)

    def _others(self, tried: list[Pair]) -> bool:
        return any(pair not in tried for pair in self._pairing.readiness().pairs)

    async def _attempt(self, job: Job, lease: Lease, watched: Watched) -> AsyncGenerator[Piece]:
        call = self._call(job, lease.pair)
        watched.attempt(call, lease.pair)
        text = _TextCutter(self._tokenizer, job)
        log = _log.bind(request_id=job.request_id, attempt_id=call.attempt_id)
        log.info("attempt_started", decode=lease.pair.decode, prefill=lease.pair.prefill)
        async with aclosing(lease.client.generate(call)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    log.info("attempt_finished", reason=event.reason.value)
                    watched.finished(event.reason, event.usage)
                    yield text.finish(End(event.reason, event.usage))
                    return
                lease.prefill_done()
                if isinstance(event, PromptScored):
                    text.score(event.positions)
                    continue
                watched.tokens(event)
                piece = text.push(event)
                if piece is not None:
                    if piece.end is not None:
                        watched.finished(piece.end.reason)
                    yield piece
                    if piece.end is not None:
                        log.info("attempt_finished", reason="stop_string")
                        return

    def _call(self, job: Job, pair: Pair) -> GenerateCall:
        left_s = job.deadline - asyncio.get_running_loop().time()
        if left_s <= 0:
            raise DeadlineExceeded("time is up before an attempt could start", stage="pair")
        return GenerateCall(
            request_id=job.request_id,
            attempt_id=AttemptId(uuid.uuid4().hex),
            prefill_address=pair.prefill,
            prompt=job.prompt,
            sampling=job.sampling,
            timeout_s=left_s,
            decode_epoch=pair.decode_epoch,
            prefill_epoch=pair.prefill_epoch,
            agreement_digest=pair.digest,
        )


def _where(pair: Pair) -> dict[str, str]:
    return {"sluice.decode": pair.decode, "sluice.prefill": pair.prefill}


def _refused(error: SluiceError) -> bool:
    """The pod said no before it began: it drains, or the agreement is of another life."""
    return isinstance(error, NotReady | StaleEpoch)


class _TextCutter:
    """Steps in, pieces out, for one attempt."""

    def __init__(self, tokenizer: ModelTokenizer, job: Job) -> None:
        self._job = job
        self._stop_ids = frozenset(job.sampling.stop_token_ids)
        self._detokenizer = Detokenizer(tokenizer, job.shown)
        self._matcher = StopMatcher(job.stops, include=job.include_stop)
        self._unstoppable = job.sampling.min_tokens  # so many tokens pass the stop strings by
        self._waiting: list[Tokens] = []
        self._scored: PromptLogprobs | None = None
        self._counted = Usage(prompt_tokens=len(job.prompt), cached_tokens=0, completion_tokens=0)

    def score(self, positions: PromptLogprobs) -> None:
        self._scored = positions

    def push(self, step: Tokens) -> Piece | None:
        """A piece when there is text to send or a stop string ended the answer, else None."""
        if self._job.prompt_only:
            return None
        self._waiting.append(step)
        self._count(step)
        ids = self._visible(step)
        passed, ids = ids[: self._unstoppable], ids[self._unstoppable :]
        self._unstoppable -= len(passed)
        text = self._detokenizer.push(passed)
        matched = self._matcher.push(self._detokenizer.push(ids))
        if matched.stop is not None:
            end = End(FinishReason.STOP, self._counted, partial=True)
            return self._piece(text + matched.text, end)
        text += matched.text
        return self._piece(text) if text else None

    def finish(self, end: End) -> Piece:
        """The last piece: what was held back, which may itself hold a stop string's end."""
        if self._job.prompt_only:
            usage = replace(end.usage, completion_tokens=0, verify_steps=0, accepted_drafts=0)
            return self._piece("", End(FinishReason.LENGTH, usage))
        matched = self._matcher.push(self._detokenizer.finish())
        if matched.stop is not None:
            return self._piece(matched.text, replace(end, reason=FinishReason.STOP))
        return self._piece(matched.text + self._matcher.finish(), end)

    def _visible(self, step: Tokens) -> tuple[int, ...]:
        """A stop token ends the answer and is no part of its text, unless asked for."""
        ids = step.token_ids
        if self._job.include_stop:
            return ids
        return ids[:-1] if ids and ids[-1] in self._stop_ids else ids

    def _piece(self, text: str, end: End | None = None) -> Piece:
        steps, self._waiting = tuple(self._waiting), []
        scored, self._scored = self._scored, None
        return Piece(text, steps, end, scored)

    def _count(self, step: Tokens) -> None:
        drafted = step.accepted_drafts is not None
        self._counted = replace(
            self._counted,
            completion_tokens=self._counted.completion_tokens + len(step.token_ids),
            verify_steps=self._counted.verify_steps + drafted,
            accepted_drafts=self._counted.accepted_drafts + (step.accepted_drafts or 0),
        )
