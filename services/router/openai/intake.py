"""From a validated body to jobs: model name, token ids, limits, one deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.router.generation import Job
from services.router.openai.errors import ModelNotFound
from services.router.openai.schema import CompletionRequest, Prompt
from sluice.errors import BadRequest
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import RequestId

_INLINE_CHARS = 20_000  # longer texts are tokenised off the event loop


class Intake:
    """Checks what only the running router knows. ``max_model_tokens`` answers 0 while unknown."""

    def __init__(
        self,
        model_name: str,
        tokenizer: ModelTokenizer,
        max_model_tokens: Callable[[], int],
        *,
        timeout_s: float,
        max_timeout_s: float,
        max_prompts: int,
    ) -> None:
        self.model_name = model_name
        self._tokenizer = tokenizer
        self._max_model_tokens = max_model_tokens
        self._timeout_s = timeout_s
        self._max_timeout_s = max_timeout_s
        self._max_prompts = max_prompts

    async def jobs(
        self, body: CompletionRequest, request_id: RequestId, drawn_seed: int
    ) -> tuple[Job, ...]:
        """One job a prompt, in order. Raises `BadRequest`, `ModelNotFound`."""
        started = asyncio.get_running_loop().time()
        if body.model is not None and body.model != self.model_name:
            raise ModelNotFound(
                f"the model {body.model!r} does not exist",
                field="model",
                remedy=f"this server has {self.model_name}",
            )
        prompts = body.prompts()
        if len(prompts) > self._max_prompts:
            raise BadRequest(
                f"{len(prompts)} prompts in one body, at most {self._max_prompts}", field="prompt"
            )
        sampling = body.sampling(self._tokenizer.eos_token_ids, drawn_seed)
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        timeout_s = min(body.timeout_s or self._timeout_s, self._max_timeout_s)
        jobs = []
        for index, prompt in enumerate(prompts):
            token_ids = await self._token_ids(prompt)
            self._check_length(token_ids, sampling.max_tokens)
            jobs.append(
                Job(
                    request_id=RequestId(f"{request_id}-{index}"),
                    prompt=token_ids,
                    sampling=sampling,
                    stops=body.stops(),
                    deadline=started + timeout_s,
                )
            )
        return tuple(jobs)

    async def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            self._check_ids(prompt, "prompt")
            return prompt
        if len(prompt) > _INLINE_CHARS:
            return await asyncio.to_thread(self._tokenizer.encode, prompt)
        return self._tokenizer.encode(prompt)

    def _check_ids(self, token_ids: tuple[int, ...], field: str) -> None:
        size = self._tokenizer.vocab_size
        if bad := next((id_ for id_ in token_ids if not 0 <= id_ < size), None):
            raise BadRequest(f"{field}: token id {bad} is not in 0..{size - 1}", field=field)

    def _check_length(self, prompt: tuple[int, ...], max_tokens: int) -> None:
        if not prompt:
            raise BadRequest("the prompt has no tokens", field="prompt")
        limit = self._max_model_tokens()
        if limit and len(prompt) + max_tokens > limit:
            field = "prompt" if len(prompt) >= limit else "max_tokens"
            raise BadRequest(
                f"this model's maximum context length is {limit} tokens, but the prompt has "
                f"{len(prompt)} and max_tokens is {max_tokens}",
                field=field,
            )
