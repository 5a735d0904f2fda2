"""One generation path for both endpoints: jobs to one whole answer, or to a stream of chunks.

What an answer looks like is a `Face`; everything else (merging, waiting for the first text, errors before and
after it, usage, leaving clients) is here, once.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel

from services.router.generation import End, Job, Piece, TextGenerator
from services.router.merge import merge
from services.router.openai.errors import error_body
from services.router.openai.schema import GenerationRequest, Steps, StopReason, UsageBody
from services.router.openai.usage import usage_body
from services.router.sse import DONE, EventStream, event, unless_disconnected
from sluice.errors import InternalError, SluiceError
from sluice.rpc.messages import Tokens
from sluice.telemetry.logging import get_logger
from sluice.types import FinishReason, RequestId

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
    with_usage: bool
    with_ids: bool


@dataclass(frozen=True)
class Part:
    """Text of one choice: all of it, or what one chunk adds. ``reason`` only at the end."""

    index: int
    text: str
    steps: Sequence[Tokens]
    reason: FinishReason | None

    @property
    def finish_reason(self) -> StopReason | None:
        return None if self.reason is None else _STOP_REASONS[self.reason]


class Face(Protocol):
    """How an endpoint writes its answers. Fields that aren't set aren't sent."""

    def whole(self, head: Head, parts: Sequence[Part], usage: UsageBody) -> BaseModel: ...

    def opening(self, head: Head, index: int) -> BaseModel | None:
        """A chunk before the first one of a choice, if the endpoint has such a thing."""
        ...

    def chunk(self, head: Head, part: Part) -> BaseModel: ...

    def usage_chunk(self, head: Head, usage: UsageBody) -> BaseModel: ...


@dataclass(frozen=True)
class Order:
    """A body, understood. Jobs come prompt by prompt, ``samples`` (the body's n) for each."""

    head: Head
    jobs: tuple[Job, ...]
    samples: int
    stream: bool

    @classmethod
    def of(
        cls, body: GenerationRequest, jobs: tuple[Job, ...], request_id: RequestId, model: str
    ) -> Order:
        head = Head(
            id=request_id,
            created=int(time.time()),
            model=model,
            with_usage=not body.stream or body.wants_usage(),
            with_ids=bool(body.return_token_ids),
        )
        return cls(head, jobs, body.n or 1, bool(body.stream))


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
    texts = [""] * len(order.jobs)
    steps: list[list[Tokens]] = [[] for _ in order.jobs]
    ends: dict[int, End] = {}
    async with aclosing(pieces):
        async for index, piece in pieces:
            texts[index] += piece.text
            steps[index] += piece.steps
            if piece.end is not None:
                ends[index] = piece.end
    parts = [
        Part(index, texts[index], steps[index], ends[index].reason)
        for index in range(len(order.jobs))
    ]
    return face.whole(order.head, parts, _usage(order, ends))


async def _events(
    order: Order,
    face: Face,
    first: tuple[int, Piece],
    rest: AsyncGenerator[tuple[int, Piece]],
) -> AsyncGenerator[bytes]:
    """SSE events. A failure becomes an error event, and then no [DONE] follows."""
    ends: dict[int, End] = {}
    opened: set[int] = set()
    try:
        async with aclosing(rest):
            async for index, piece in _chain(first, rest):
                if index not in opened:
                    opened.add(index)
                    if (opening := face.opening(order.head, index)) is not None:
                        yield event(_json(opening))
                if piece.end is not None:
                    ends[index] = piece.end
                reason = piece.end.reason if piece.end else None
                part = Part(index, piece.text, piece.steps, reason)
                yield event(_json(face.chunk(order.head, part)))
    except SluiceError as error:
        _log.warning("stream_failed", code=error.code, error=str(error))
        yield event(error_body(error).model_dump_json())
        return
    except Exception as error:
        _log.error("router_untyped_error", exc_info=error)
        bug = InternalError(f"{type(error).__name__} in the router", stage="route")
        yield event(error_body(bug).model_dump_json())
        return
    if order.head.with_usage:
        yield event(_json(face.usage_chunk(order.head, _usage(order, ends))))
    yield DONE


def _usage(order: Order, ends: dict[int, End]) -> UsageBody:
    assert len(ends) == len(order.jobs), "an answer ended without saying how"
    return usage_body([ends[index] for index in range(len(order.jobs))], order.samples)


async def _chain(
    first: tuple[int, Piece], rest: AsyncGenerator[tuple[int, Piece]]
) -> AsyncGenerator[tuple[int, Piece]]:
    yield first
    async for item in rest:
        yield item


def _json(body: BaseModel) -> str:
    return body.model_dump_json(exclude_unset=True)
