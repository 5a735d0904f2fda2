"""``POST /v1/completions``: the text face of the one generation path."""

from __future__ import annotations

from collections.abc import Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.router.edge import name_request
from services.router.generation import TextGenerator
from services.router.openai.answer import Head, Order, Part, add_steps, respond
from services.router.openai.completion_schema import Choice, Completion, CompletionRequest
from services.router.openai.errors import STREAM_ANSWERS
from services.router.openai.intake import Intake, warn_ignored
from services.router.openai.schema import UsageBody


class TextFace:
    """Whole answers and chunks have the same shape; usage of a chunk only with include_usage."""

    def whole(self, head: Head, parts: Sequence[Part], usage: UsageBody) -> Completion:
        answer = _completion(head, [_choice(head, part) for part in parts])
        answer.usage = usage
        return answer

    def opening(self, head: Head, index: int) -> None:
        return None

    def chunk(self, head: Head, part: Part) -> Completion:
        return _completion(head, [_choice(head, part)])

    def usage_chunk(self, head: Head, usage: UsageBody) -> Completion:
        return self.whole(head, [], usage)


def completions_routes(intake: Intake, generator: TextGenerator) -> APIRouter:
    routes = APIRouter()
    face = TextFace()

    @routes.post("/v1/completions", response_model=Completion, responses=STREAM_ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        request_id = name_request(request, "cmpl")
        warn_ignored(body)
        jobs = await intake.completion_jobs(body, request_id)
        order = Order.of(body, jobs, request_id, intake.model_name)
        return await respond(order, face, generator, request)

    return routes


def _choice(head: Head, part: Part) -> Choice:
    choice = Choice(
        index=part.index, text=part.text, logprobs=None, finish_reason=part.finish_reason
    )
    add_steps(choice, head, part)
    return choice


def _completion(head: Head, choices: list[Choice]) -> Completion:
    answer = Completion(
        id=head.id,
        object="text_completion",
        created=head.created,
        model=head.model,
        choices=choices,
    )
    if head.with_usage:
        answer.usage = None
    return answer
