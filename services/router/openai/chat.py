"""``POST /v1/chat/completions``: the chat face of the one generation path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.router.edge import name_request
from services.router.generation import Job, TextGenerator
from services.router.openai.answer import Head, Order, Part, add_steps, respond
from services.router.openai.chat_schema import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatRequest,
    ChunkChoice,
)
from services.router.openai.errors import STREAM_ANSWERS
from services.router.openai.intake import Intake, warn_ignored
from services.router.openai.logprobs import ChatLogprobs, Speller
from services.router.openai.reply import Reading, delta, message
from services.router.openai.reply_plan import ReplyPlan
from services.router.openai.schema import StopReason
from sluice.text.tokenizer import ModelTokenizer


class ChatFace:
    """A choice's first chunk carries the role and no text; its last one the finish reason."""

    def __init__(
        self,
        body: ChatRequest,
        head: Head,
        jobs: Sequence[Job],
        plan: ReplyPlan,
        tokenizer: ModelTokenizer,
    ) -> None:
        self._body = body
        self._head = head
        self._prompt = jobs[0].prompt
        self._speller = Speller(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        self._readings = [Reading(plan.parser(eager=bool(body.stream))) for _ in jobs]
        self._opened: set[int] = set()

    def whole(self, parts: Sequence[Part]) -> ChatCompletion:
        answer = ChatCompletion(
            id=self._head.id,
            object="chat.completion",
            created=self._head.created,
            model=self._head.model,
            choices=[self._whole_choice(part) for part in parts],
        )
        if self._body.prompt_logprobs is not None and parts[0].scored is not None:
            answer.prompt_logprobs = self._speller.prompt(self._prompt, parts[0].scored)
        return answer

    def chunks(self, part: Part) -> Iterable[ChatChunk]:
        if part.index not in self._opened:
            self._opened.add(part.index)
            opening = ChunkChoice(
                index=part.index, delta=delta([], opens=True), logprobs=None, finish_reason=None
            )
            yield self._chunk([opening])
        reading = self._readings[part.index]
        parts = reading.push(part.text, ends=part.end is not None)
        choice = ChunkChoice(
            index=part.index,
            delta=delta(parts),
            logprobs=self._logprobs(part),
            finish_reason=_reason(part, reading),
        )
        add_steps(choice, self._head, part)
        if parts or part.end is not None or choice.logprobs is not None or self._head.with_ids:
            yield self._chunk([choice])

    def last(self) -> ChatChunk:
        return self._chunk([])

    def _whole_choice(self, part: Part) -> ChatChoice:
        reading = self._readings[part.index]
        parts = reading.push(part.text, ends=True)
        reason = _reason(part, reading)
        assert reason is not None, "a whole answer has ended"
        choice = ChatChoice(
            index=part.index,
            message=message(parts),
            logprobs=self._logprobs(part),
            finish_reason=reason,
        )
        add_steps(choice, self._head, part)
        return choice

    def _logprobs(self, part: Part) -> ChatLogprobs | None:
        return self._speller.chat(part.steps) if self._body.logprobs and part.steps else None

    def _chunk(self, choices: list[ChunkChoice]) -> ChatChunk:
        return ChatChunk(
            id=self._head.id,
            object="chat.completion.chunk",
            created=self._head.created,
            model=self._head.model,
            choices=choices,
        )


def chat_routes(intake: Intake, generator: TextGenerator) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM_ANSWERS)
    async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
        request_id = name_request(request, "chatcmpl")
        warn_ignored(body)
        jobs, plan = await intake.chat_jobs(body, request_id)
        order = Order.of(body, jobs, request_id, intake.model_name)
        face = ChatFace(body, order.head, jobs, plan, intake.tokenizer)
        return await respond(order, face, generator, request)

    return routes


def _reason(part: Part, reading: Reading) -> StopReason | None:
    """An answer that the model ended with calls waits for their results."""
    return "tool_calls" if part.stop_reason == "stop" and reading.called else part.stop_reason
