"""``POST /v1/completions``: the text face of the one generation path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastapi import APIRouter, Request
from fastapi.responses import Response

from services.router.edge import name_request
from services.router.generation import Job, TextGenerator
from services.router.openai.answer import Head, Order, Part, add_steps, respond
from services.router.openai.completion_schema import Choice, Completion, CompletionRequest
from services.router.openai.errors import STREAM_ANSWERS
from services.router.openai.intake import Intake, warn_ignored
from services.router.openai.logprobs import Offsets, Scored, Speller, scored
from sluice.text.detokenize import Detokenizer
from sluice.text.tokenizer import ModelTokenizer


class TextFace:
    """Whole answers and chunks have the same shape. An echo opens a choice."""

    def __init__(
        self,
        body: CompletionRequest,
        head: Head,
        jobs: Sequence[Job],
        tokenizer: ModelTokenizer,
    ) -> None:
        self._body = body
        self._head = head
        self._jobs = jobs
        self._speller = Speller(tokenizer, as_ids=bool(body.return_tokens_as_token_ids))
        prompts = [prompt for prompt in body.prompts() for _ in range(body.n or 1)]
        self._echoes = [
            self._echo(prompt, job, tokenizer) if body.echo else ""
            for prompt, job in zip(prompts, jobs, strict=True)
        ]
        self._offsets = [
            Offsets(tokenizer, job.shown, echo)
            for job, echo in zip(jobs, self._echoes, strict=True)
        ]
        self._opened: set[int] = set()

    def whole(self, parts: Sequence[Part]) -> Completion:
        return self._completion([self._choice(part) for part in parts])

    def chunks(self, part: Part) -> Iterable[Completion]:
        yield self._completion([self._choice(part)])

    def last(self) -> Completion:
        return self._completion([])

    def _choice(self, part: Part) -> Choice:
        opens = part.index not in self._opened
        self._opened.add(part.index)
        echoed = opens and bool(self._body.echo)
        tokens = scored(part.steps)
        if echoed:
            tokens = [*self._prompt_tokens(part), *tokens]
        wanted = self._body.logprobs is not None
        choice = Choice(
            index=part.index,
            text=self._echoes[part.index] + part.text if echoed else part.text,
            logprobs=self._speller.text(tokens, self._offsets[part.index]) if wanted else None,
            finish_reason=part.stop_reason,
        )
        if opens and self._body.prompt_logprobs is not None and part.scored is not None:
            prompt = self._jobs[part.index].prompt
            choice.prompt_logprobs = self._speller.prompt(prompt, part.scored)
        add_steps(choice, self._head, part)
        return choice

    def _prompt_tokens(self, part: Part) -> list[Scored]:
        prompt = self._jobs[part.index].prompt
        positions = part.scored or (None,) * len(prompt)
        return list(zip(prompt, positions, strict=True))

    def _echo(self, prompt: object, job: Job, tokenizer: ModelTokenizer) -> str:
        """A text as it was sent; the text of token ids."""
        if isinstance(prompt, str):
            return prompt
        detokenizer = Detokenizer(tokenizer, job.shown)
        return detokenizer.push(job.prompt) + detokenizer.finish()

    def _completion(self, choices: list[Choice]) -> Completion:
        return Completion(
            id=self._head.id,
            object="text_completion",
            created=self._head.created,
            model=self._head.model,
            choices=choices,
        )


def completions_routes(intake: Intake, generator: TextGenerator) -> APIRouter:
    routes = APIRouter()

    @routes.post("/v1/completions", response_model=Completion, responses=STREAM_ANSWERS)
    async def create_completion(body: CompletionRequest, request: Request) -> Response:
        request_id = name_request(request, "cmpl")
        warn_ignored(body)
        jobs = await intake.completion_jobs(body, request_id)
        order = Order.of(body, jobs, request_id, intake.model_name)
        face = TextFace(body, order.head, jobs, intake.tokenizer)
        return await respond(order, face, generator, request)

    return routes
