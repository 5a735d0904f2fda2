"""From a validated body to jobs: model name, token ids, limits, seeds, one deadline."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import replace

from services.router.generation import Job
from services.router.openai.chat_schema import Chat, ChatRequest
from services.router.openai.completion_schema import (
    DEFAULT_MAX_TOKENS,
    CompletionRequest,
    Prompt,
)
from services.router.openai.errors import ModelNotFound
from services.router.openai.policy import CheckedBody
from services.router.openai.schema import GenerationRequest
from sluice.errors import BadRequest
from sluice.telemetry.logging import get_logger
from sluice.text.chat import FILE, ChatTemplate
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import RequestId

_INLINE_CHARS = 20_000  # longer texts are tokenised off the event loop
_UNLIMITED_ANSWER_TOKENS = 1024  # of a chat that states no limit, on pods that state none
_log = get_logger(__name__)


class Intake:
    """Checks what only the running router knows. ``max_model_tokens`` answers 0 while unknown."""

    def __init__(
        self,
        model_name: str,
        tokenizer: ModelTokenizer,
        template: ChatTemplate | None,
        max_model_tokens: Callable[[], int],
        *,
        timeout_s: float,
        max_timeout_s: float,
        max_prompts: int,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.max_model_tokens = max_model_tokens
        self._template = template
        self._timeout_s = timeout_s
        self._max_timeout_s = max_timeout_s
        self._max_prompts = max_prompts

    async def completion_jobs(
        self, body: CompletionRequest, request_id: RequestId
    ) -> tuple[Job, ...]:
        """``n`` jobs a prompt, in order. Raises `BadRequest`, `ModelNotFound`."""
        deadline = self._deadline(body)
        self.check_model(body.model)
        prompts = body.prompts()
        self._check_count(len(prompts), body.n or 1)
        special = body.add_special_tokens is not False
        ids = [await self._prompt_ids(prompt, special) for prompt in prompts]
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        return self._jobs(body, ids, "prompt", max_tokens, request_id, deadline)

    async def chat_jobs(self, body: ChatRequest, request_id: RequestId) -> tuple[Job, ...]:
        """``n`` jobs. Without a limit an answer may fill the context. Raises as above."""
        deadline = self._deadline(body)
        self.check_model(body.model)
        self._check_count(1, body.n or 1)
        max_tokens = body.asked_tokens()
        ids = await self.chat_ids(body.chat())
        if max_tokens is None:
            limit = self.max_model_tokens() or len(ids) + _UNLIMITED_ANSWER_TOKENS
            max_tokens = max(limit - len(ids), 1)
        return self._jobs(body, [ids], "messages", max_tokens, request_id, deadline)

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist",
                field="model",
                remedy=f"this server has {self.model_name}",
            )

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        size = self.tokenizer.vocab_size
        bad = next((id_ for id_ in token_ids if not 0 <= id_ < size), None)
        if bad is not None:
            raise BadRequest(f"{field}: token id {bad} is not in 0..{size - 1}", field=field)

    async def text_ids(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        def encode() -> tuple[int, ...]:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

        return await _off_loop(encode, len(text))

    async def chat_ids(self, chat: Chat) -> tuple[int, ...]:
        """Ids of the rendered chat. Raises `BadRequest` without a template, or when it refuses."""
        template = self._template
        if template is None:
            raise BadRequest(
                f"the model {self.model_name} has no chat template",
                field="messages",
                remedy=f"use /v1/completions, or put a {FILE} into the router's model folder",
            )

        def encode() -> tuple[int, ...]:
            text = template.render(
                chat.turns,
                add_generation_prompt=chat.add_generation_prompt,
                variables=chat.variables,
            )
            return self.tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)

        return await _off_loop(encode, sum(len(turn.content) for turn in chat.turns))

    def _jobs(
        self,
        body: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        field: str,
        max_tokens: int,
        request_id: RequestId,
        deadline: float,
    ) -> tuple[Job, ...]:
        sampling = body.sampling(max_tokens, self.tokenizer.eos_token_ids, secrets.randbits(63))
        self.check_ids(sampling.stop_token_ids, "stop_token_ids")
        samples = body.n or 1
        for prompt in prompts:
            self._check_length(prompt, max_tokens, field)
        return tuple(
            Job(
                request_id=RequestId(f"{request_id}-{rank * samples + sample}"),
                prompt=prompt,
                sampling=replace(sampling, seed=sample_seed(sampling.seed, sample)),
                stops=body.stops(),
                deadline=deadline,
                include_stop=bool(body.include_stop_str_in_output),
            )
            for rank, prompt in enumerate(prompts)
            for sample in range(samples)
        )

    async def _prompt_ids(self, prompt: Prompt, add_special_tokens: bool) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.text_ids(prompt, add_special_tokens=add_special_tokens)
        self.check_ids(prompt, "prompt")
        return prompt

    def _deadline(self, body: GenerationRequest) -> float:
        timeout_s = min(body.timeout_s or self._timeout_s, self._max_timeout_s)
        return asyncio.get_running_loop().time() + timeout_s

    def _check_count(self, prompts: int, samples: int) -> None:
        if prompts * samples > self._max_prompts:
            raise BadRequest(
                f"{prompts} prompts with n {samples} are {prompts * samples} answers, "
                f"at most {self._max_prompts} to one body",
                field="prompt" if prompts > self._max_prompts else "n",
            )

    def _check_length(self, prompt: tuple[int, ...], max_tokens: int, field: str) -> None:
        if not prompt:
            raise BadRequest("the prompt has no tokens", field=field)
        limit = self.max_model_tokens()
        if limit and len(prompt) + max_tokens > limit:
            raise BadRequest(
                f"this model's maximum context length is {limit} tokens, but the {field} has "
                f"{len(prompt)} and max_tokens is {max_tokens}",
                field=field if len(prompt) >= limit else "max_tokens",
            )


async def _off_loop(work: Callable[[], tuple[int, ...]], num_chars: int) -> tuple[int, ...]:
    return await asyncio.to_thread(work) if num_chars > _INLINE_CHARS else work()


def warn_ignored(body: CheckedBody) -> None:
    """Log fields that are ignored. Raises `BadRequest` for those that can't be."""
    for name in body.check_extra():
        _log.warning("field_ignored", field=name)


def sample_seed(seed: int, sample: int) -> int:
    """Seed of a prompt's ``sample``-th answer: the body's own, then hashes of it.

    Hashed, not counted up, so that bodies with neighbouring seeds share no answer.
    """
    if sample == 0:
        return seed
    digest = hashlib.sha256(f"{seed}:{sample}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
