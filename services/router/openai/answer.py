"""One generation path for both endpoints: jobs to one whole answer, or to a stream of chunks.

What an answer looks like is a `Face`; everything else (merging, waiting for the first text, errors before and
after it, usage, leaving clients) is here, once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from services.router.generation import End, Job, Piece, TextGenerator
from services.router.merge import merge
from services.router.openai.errors import error_body
from services.router.openai.request_schema import GenerationRequest
from services.router.openai.schema import Answer, Steps, StopReason
from services.router.openai.usage import Tally
from services.router.sse import DONE, EventStream, event, unless_disconnected
from sluice.errors import InternalError, SluiceError
from sluice.rpc.messages import Tokens
from sluice.telemetry.logging import get_logger
from sluice.types import FinishReason, PromptLogprobs, RequestId

_STOP_REASONS: dict[FinishReason, StopReason] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}
_log = get_logger(__name__)


@dataclass(frozen=True)
class Head:
    """What all chunks of one body share, and which extras the client asked for."""

    id: str
    created: int
    model: str
    with_ids: bool


@dataclass(frozen=True)
class Part:
    """Text of one choice: all of it, or what one chunk adds. ``end`` only at the end."""

    index: int
    text: str
    steps: Sequence[Tokens]
    scored: PromptLogprobs | None
    end: End | None

    @property
    def stop_reason(self) -> StopReason | None:
        return None if self.end is None else _STOP_REASONS[self.end.reason]


class Face(Protocol):
    """How an endpoint writes the answers to one body."""

    def whole(self, parts: Sequence[Part]) -> Answer: ...

    def chunks(self, part: Part) -> Iterable[Answer]:
        """What to send for ``part``; parts of a choice come in order. May be nothing yet."""
        ...

    def last(self) -> Answer:
        """A chunk without choices, for usage."""
        ...


@dataclass(frozen=True)
class Order:
    """A body, understood. Jobs come prompt by prompt, ``samples`` (the body's n) for each."""

    head: Head
    jobs: tuple[Job, ...]
    samples: int
    stream: bool
    with_usage: bool
    with_running_usage: bool

    @classmethod
    def of(
        cls, body: GenerationRequest, jobs: tuple[Job, ...], request_id: RequestId, model: str
    ) -> Order:
        return cls(
            head=Head(
                id=request_id,
                created=int(time.time()),
                model=model,
                with_ids=bool(body.return_token_ids),
            ),
            jobs=jobs,
            samples=body.n or 1,
            stream=bool(body.stream),
            with_usage=body.wants_usage(),
            with_running_usage=body.wants_running_usage(),
        )


async def respond(order: Order, face: Face, generator: TextGenerator, request: Request) -> Response:
    """The HTTP answer. Raises `SluiceError` when it fails before anything could be sent."""
    pieces = merge([generator.run(job, hold=not order.stream) for job in order.jobs])
    if order.stream:
        # The status line waits for the first text, so that a failure before it keeps its own.
        first = await unless_disconnected(request.receive, anext(pieces))
        return EventStream(_events(order, face, first, pieces))
    whole = await unless_disconnected(request.receive, _collect(order, face, pieces))
    return Response(_json(whole), media_type=JSONResponse.media_type)


def add_steps(choice: Steps, head: Head, part: Part) -> None:
    """Token ids and accepted drafts, when the client asked for them."""
    if head.with_ids:
        choice.token_ids = [token for step in part.steps for token in step.token_ids]
        choice.accepted_drafts = [step.accepted_drafts for step in part.steps]


async def _collect(
    order: Order, face: Face, pieces: AsyncGenerator[tuple[int, Piece]]
) -> BaseModel:
    got: list[list[Piece]] = [[] for _ in order.jobs]
    tally = Tally(order.jobs, order.samples)
    async with aclosing(pieces):
        async for index, piece in pieces:
            got[index].append(piece)
            tally.count(index, piece)
    answer = face.whole([_joined(index, mine) for index, mine in enumerate(got)])
    answer.usage = tally.total()
    return answer


async def _events(
    order: Order,
    face: Face,
    first: tuple[int, Piece],
    rest: AsyncGenerator[tuple[int, Piece]],
) -> AsyncGenerator[bytes]:
    """SSE events. A failure becomes an error event, and then no [DONE] follows.

    Usage comes before the error: clients stop reading at that.
    """
    tally = Tally(order.jobs, order.samples)
    failure: SluiceError | None = None
    try:
        async with aclosing(rest):
            async for index, piece in _chain(first, rest):
                tally.count(index, piece)
                part = Part(index, piece.text, piece.steps, piece.scored, piece.end)
                for chunk in face.chunks(part):
                    if order.with_usage:
                        running = order.with_running_usage
                        chunk.usage = tally.of(index) if running else None
                    yield event(_json(chunk))
    except SluiceError as error:
        _log.warning("stream_failed", code=error.code, error=str(error))
        failure = error
    except Exception as error:
        _log.error("router_untyped_error", exc_info=error)
        failure = InternalError(f"{type(error).__name__} in the router", stage="route")
    if order.with_usage:
        last = face.last()
        last.usage = tally.total()
        yield event(_json(last))
    yield DONE if failure is None else event(error_body(failure).model_dump_json())


def _joined(index: int, pieces: Sequence[Piece]) -> Part:
    """All pieces of one choice as one part."""
    assert pieces, "an answer ended without saying how"
    scored = next((piece.scored for piece in pieces if piece.scored is not None), None)
    text = "".join(piece.text for piece in pieces)
    steps = [step for piece in pieces for step in piece.steps]
    return Part(index, text, steps, scored, pieces[-1].end)


async def _chain(
    first: tuple[int, Piece], rest: AsyncGenerator[tuple[int, Piece]]
) -> AsyncGenerator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item


def _json(body: BaseModel) -> str:
    return body.model_dump_json(exclude_unset=True)
