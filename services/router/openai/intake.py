"""From a validated body to jobs: model name, token ids, limits, seeds, one deadline."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from services.router.generation import Job
from services.router.openai.chat_schema import ChatRequest
from services.router.openai.completion_schema import DEFAULT_MAX_TOKENS, CompletionRequest
from services.router.openai.errors import ContextLengthExceeded, ModelNotFound
from services.router.openai.policy import CheckedBody
from services.router.openai.prompts import Prompts, off_loop
from services.router.openai.reply_plan import ReplyPlan, plan_reply
from services.router.openai.request_schema import GenerationRequest
from services.router.openai.structure import Opening, answer_grammar
from sluice.errors import BadRequest
from sluice.telemetry.logging import get_logger
from sluice.types import Grammar, RequestId

_UNLIMITED_ANSWER_TOKENS = 1024  # of a chat that states no limit, on pods that state none
_log = get_logger(__name__)


@dataclass(frozen=True)
class Limits:
    """``max_prompts`` counts answers to one body: prompts times n."""

    timeout_s: float
    max_timeout_s: float
    max_prompts: int


class Intake:
    """Checks what only the running router knows. ``max_model_tokens`` answers 0 while unknown."""

    def __init__(
        self, prompts: Prompts, max_model_tokens: Callable[[], int], limits: Limits
    ) -> None:
        self.prompts = prompts
        self.model_name = prompts.model_name
        self.tokenizer = prompts.tokenizer
        self.max_model_tokens = max_model_tokens
        self._limits = limits

    async def completion_jobs(
        self, body: CompletionRequest, request_id: RequestId
    ) -> tuple[Job, ...]:
        """``n`` jobs a prompt, in order. Raises `BadRequest`, `ModelNotFound`."""
        deadline = self._check(body)
        prompts = body.prompts()
        self._check_count(len(prompts), body.n or 1)
        special = body.add_special_tokens is not False
        ids = [await self.prompts.ids(prompt, add_special_tokens=special) for prompt in prompts]
        grammar = answer_grammar(body.response_format, body.structured_outputs, Opening())
        max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        draft = self._draft(body, max_tokens, grammar, frozenset(), deadline)
        return self._jobs(body, ids, "prompt", draft, request_id)

    async def chat_jobs(
        self, body: ChatRequest, request_id: RequestId
    ) -> tuple[tuple[Job, ...], ReplyPlan]:
        """``n`` jobs, and how to read their answers. Without a limit one may fill the context.

        Raises as above.
        """
        deadline = self._check(body)
        self._check_count(1, body.n or 1)
        rendered = await self.prompts.chat(body.chat())

        def plan() -> ReplyPlan:
            return plan_reply(body, self.prompts.format, rendered.thinking, self.tokenizer)

        reply = await off_loop(plan, sum(len(tool.given) for tool in body.callable_tools()))
        max_tokens = body.asked_tokens()
        if max_tokens is None:
            used = len(rendered.ids)
            limit = self.max_model_tokens() or used + _UNLIMITED_ANSWER_TOKENS
            max_tokens = max(limit - used, 1)
        draft = self._draft(body, max_tokens, reply.grammar, reply.shown, deadline)
        return self._jobs(body, [rendered.ids], "messages", draft, request_id), reply

    def check_model(self, name: str | None) -> None:
        if name is not None and name != self.model_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist",
                field="model",
                remedy=f"this server has {self.model_name}",
            )

    def _check(self, body: GenerationRequest) -> float:
        """What can be known before there is a prompt. Returns the deadline."""
        timeout_s = min(body.timeout_s or self._limits.timeout_s, self._limits.max_timeout_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        self.check_model(body.model)
        body.check_together()
        self.prompts.check_ids(body.stop_token_ids or (), "stop_token_ids")
        self.prompts.check_ids([token for token, _ in body.biases()], "logit_bias")
        return deadline

    def _draft(
        self,
        body: GenerationRequest,
        max_tokens: int,
        grammar: Grammar | None,
        shown: frozenset[int],
        deadline: float,
    ) -> Job:
        """What all jobs of a body have in common."""
        _check_min_tokens(body.min_tokens or 0, max_tokens)
        sampling = body.sampling(
            max(max_tokens, 1), self.tokenizer.eos_token_ids, secrets.randbits(63)
        )
        if body.skip_special_tokens is False:
            shown = self.tokenizer.special_token_ids
        return Job(
            request_id=RequestId(""),
            prompt=(),
            sampling=replace(sampling, grammar=grammar),
            stops=body.stops(),
            deadline=deadline,
            include_stop=bool(body.include_stop_str_in_output),
            shown=shown,
            prompt_only=max_tokens == 0,
        )

    def _jobs(
        self,
        body: GenerationRequest,
        prompts: Sequence[tuple[int, ...]],
        field: str,
        draft: Job,
        request_id: RequestId,
    ) -> tuple[Job, ...]:
        samples = body.n or 1
        for prompt in prompts:
            self._check_length(prompt, draft.sampling.max_tokens, field)
        return tuple(
            replace(
                draft,
                request_id=RequestId(f"{request_id}-{rank * samples + sample}"),
                prompt=prompt,
                sampling=replace(draft.sampling, seed=sample_seed(draft.sampling.seed, sample)),
            )
            for rank, prompt in enumerate(prompts)
            for sample in range(samples)
        )

    def _check_count(self, prompts: int, samples: int) -> None:
        most = self._limits.max_prompts
        if prompts * samples > most:
            raise BadRequest(
                f"{prompts} prompts with n {samples} are {prompts * samples} answers, "
                f"at most {most} to one body",
                field="prompt" if prompts > most else "n",
            )

    def _check_length(self, prompt: tuple[int, ...], max_tokens: int, field: str) -> None:
        if not prompt:
            raise BadRequest("the prompt has no tokens", field=field)
        limit = self.max_model_tokens()
        if limit and len(prompt) + max_tokens > limit:
            raise ContextLengthExceeded(
                f"this model's maximum context length is {limit} tokens, but the {field} has "
                f"{len(prompt)} and max_tokens is {max_tokens}",
                field=field if len(prompt) >= limit else "max_tokens",
            )


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


def _check_min_tokens(min_tokens: int, max_tokens: int) -> None:
    if min_tokens > max_tokens:
        raise BadRequest(
            f"min_tokens is {min_tokens}, more than max_tokens, which is {max_tokens}",
            field="min_tokens",
        )
