"""``POST /v1/chat/completions``: the chat face of the one generation path."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.router.edge import name_request
from services.router.generation import TextGenerator
from services.router.openai.answer import Head, Order, Part, add_steps, respond
from services.router.openai.chat_schema import (
    AnswerMessage,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
    Delta,
)
from services.router.openai.errors import STREAM_ANSWERS
from services.router.openai.intake import Intake, warn_ignored
from services.router.openai.schema import StopReason, UsageBody


class ChatFace:
    """A choice's first chunk carries the role and no text; its last one the finish reason."""

    def whole(self, head: Head, parts: Sequence[Part], usage: UsageBody) -> ChatCompletion:
        return ChatCompletion(
            id=head.id,
            object="chat.completion",
            created=head.created,
            model=head.model,
            choices=[_whole_choice(head, part) for part in parts],
            usage=usage,
        )

    def opening(self, head: Head, index: int) -> ChatChunk:
        return _chunk(head, [_chunk_choice(index, Delta(role="assistant", content=""), None)])

    def chunk(self, head: Head, part: Part) -> ChatChunk:
        delta = Delta(content=part.text) if part.text else Delta()
        choice = _chunk_choice(part.index, delta, part.finish_reason)
        add_steps(choice, head, part)
        return _chunk(head, [choice])

    def usage_chunk(self, head: Head, usage: UsageBody) -> ChatChunk:
        chunk = _chunk(head, [])
        chunk.usage = usage
        return chunk


def chat_routes(intake: Intake, generator: TextGenerator) -> APIRouter:
    routes = APIRouter()
    face = ChatFace()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM_ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        request_id = name_request(request, "chatcmpl")
        warn_ignored(body)
        jobs = await intake.chat_jobs(body, request_id)
        order = Order.of(body, jobs, request_id, intake.model_name)
        return await respond(order, face, generator, request)

    return routes


def _whole_choice(head: Head, part: Part) -> ChatChoice:
    assert part.finish_reason is not None, "a whole answer has ended"
    choice = ChatChoice(
        index=part.index,
        message=AnswerMessage(role="assistant", content=part.text, refusal=None),
        logprobs=None,
        finish_reason=part.finish_reason,
    )
    add_steps(choice, head, part)
    return choice


def _chunk_choice(index: int, delta: Delta, finish_reason: StopReason | None) -> ChunkChoice:
    return ChunkChoice(index=index, delta=delta, logprobs=None, finish_reason=finish_reason)


def _chunk(head: Head, choices: list[ChunkChoice]) -> ChatChunk:
    chunk = ChatChunk(
        id=head.id,
        object="chat.completion.chunk",
        created=head.created,
        model=head.model,
        choices=choices,
    )
    if head.with_usage:
        chunk.usage = None
    return chunk
