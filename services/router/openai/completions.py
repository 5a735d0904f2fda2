"""``POST /v1/completions``: a body to jobs, jobs to one answer or a stream of chunks."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from services.router.generation import End, Piece, TextGenerator
from services.router.merge import merge
from services.router.openai.errors import ErrorBody, error_body
from services.router.openai.intake import Intake
from services.router.openai.schema import Choice, Completion, CompletionRequest, UsageBody
from services.router.openai.usage import usage_body
from services.router.sse import DONE, EventStream, event, unless_disconnected
from sluice.errors import InternalError, SluiceError
from sluice.rpc.messages import Tokens
from sluice.telemetry.logging import bind, get_logger
from sluice.types import FinishReason, RequestId

_log = get_logger(__name__)


@dataclass(frozen=True)
class _Answer:
    """What all chunks of one body share, and which extras the client asked for."""

    id: str
    created: int
    model: str
    with_usage: bool
    with_ids: bool

    def completion(self, choices: list[Choice], usage: UsageBody | None = None) -> Completion:
        return Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def choice(
        self, index: int, text: str, steps: Sequence[Tokens], reason: FinishReason | None
    ) -> Choice:
        choice = Choice(index=index, text=text, finish_reason=_finish_reason(reason))
        if self.with_ids:
            choice.token_ids = [token for step in steps for token in step.token_ids]
            choice.accepted_drafts = [step.accepted_drafts for step in steps]
        return choice

    def json(self, completion: Completion, *, chunk: bool) -> str:
        """Extras that nobody asked for stay out; ``usage`` of a chunk only with include_usage."""
        no_extras = {"token_ids", "accepted_drafts"} if not self.with_ids else set()
        no_usage = chunk and not self.with_usage
        return completion.model_dump_json(
            exclude={"choices": {"__all__": no_extras}, **({"usage": True} if no_usage else {})}
        )


def completions_routes(intake: Intake, generator: TextGenerator) -> APIRouter:
    routes = APIRouter()
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorBody} for status in (400, 404, 429, 500, 503, 504)
    }

    @routes.post("/v1/completions", response_model=Completion, responses=errors)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        request_id = RequestId(f"cmpl-{uuid.uuid4().hex}")
        bind(request_id=request_id)
        for name in body.check_extra():
            _log.warning("field_ignored", field=name)
        jobs = await intake.jobs(body, request_id, secrets.randbits(63))
        options = body.stream_options
        answer = _Answer(
            id=request_id,
            created=int(time.time()),
            model=intake.model_name,
            with_usage=options is not None and options.include_usage,
            with_ids=bool(body.return_token_ids),
        )
        stream = bool(body.stream)
        pieces = merge([generator.run(job, hold=not stream) for job in jobs])
        headers = {"x-request-id": request_id}
        if stream:
            # The status line waits for the first text, so that a failure before it keeps its own.
            first = await unless_disconnected(request.receive, anext(pieces))
            return EventStream(_events(answer, first, pieces, len(jobs)), headers)
        whole = await unless_disconnected(request.receive, _collect(answer, pieces, len(jobs)))
        return Response(
            answer.json(whole, chunk=False), headers=headers, media_type=JSONResponse.media_type
        )

    return routes


async def _collect(
    answer: _Answer, pieces: AsyncGenerator[tuple[int, Piece]], num_prompts: int
) -> Completion:
    texts = [""] * num_prompts
    steps: list[list[Tokens]] = [[] for _ in range(num_prompts)]
    ends: dict[int, End] = {}
    async with aclosing(pieces):
        async for index, piece in pieces:
            texts[index] += piece.text
            steps[index] += piece.steps
            if piece.end is not None:
                ends[index] = piece.end
    choices = [
        answer.choice(index, texts[index], steps[index], ends[index].reason)
        for index in range(num_prompts)
    ]
    return answer.completion(choices, usage_body([ends[i] for i in range(num_prompts)]))


async def _events(
    answer: _Answer,
    first: tuple[int, Piece],
    rest: AsyncGenerator[tuple[int, Piece]],
    num_prompts: int,
) -> AsyncGenerator[bytes]:
    """SSE events. A failure becomes an error event, and then no [DONE] follows."""
    ends: list[End] = []
    try:
        async with aclosing(rest):
            async for index, piece in _chain(first, rest):
                reason = piece.end.reason if piece.end else None
                if piece.end is not None:
                    ends.append(piece.end)
                choice = answer.choice(index, piece.text, piece.steps, reason)
                yield event(answer.json(answer.completion([choice]), chunk=True))
    except SluiceError as error:
        _log.warning("stream_failed", code=error.code, error=str(error))
        yield event(error_body(error).model_dump_json())
        return
    except Exception as error:
        _log.error("router_untyped_error", exc_info=error)
        bug = InternalError(f"{type(error).__name__} in the router", stage="route")
        yield event(error_body(bug).model_dump_json())
        return
    assert len(ends) == num_prompts
    if answer.with_usage:
        yield event(answer.json(answer.completion([], usage_body(ends)), chunk=True))
    yield DONE


async def _chain(
    first: tuple[int, Piece], rest: AsyncGenerator[tuple[int, Piece]]
) -> AsyncGenerator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item


def _finish_reason(reason: FinishReason | None) -> str | None:
    return None if reason is None else reason.value
