"""From a body's prompt or chat to token ids."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from services.router.openai.chat_schema import Chat
from services.router.openai.completion_schema import Prompt
from sluice.errors import BadRequest
from sluice.text.chat import FILE, ChatTemplate
from sluice.text.reply.formats import ReplyFormat
from sluice.text.reply.reasoning import Thinking, thinking_after
from sluice.text.tokenizer import ModelTokenizer
from sluice.text.tool_prompt import spelled_out

_INLINE_CHARS = 20_000  # longer texts are worked on off the event loop
T = TypeVar("T")


@dataclass(frozen=True)
class Rendered:
    """A chat as its prompt; ``thinking`` is where that leaves the model."""

    ids: tuple[int, ...]
    thinking: Thinking


class Prompts:
    """One model's tokenizer, chat template and way of answering. No ``template``, no chat."""

    def __init__(
        self,
        model_name: str,
        tokenizer: ModelTokenizer,
        template: ChatTemplate | None,
        format_: ReplyFormat,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.format = format_
        self._template = template

    def check_ids(self, token_ids: Sequence[int], field: str) -> None:
        size = self.tokenizer.vocab_size
        bad = next((id_ for id_ in token_ids if not 0 <= id_ < size), None)
        if bad is not None:
            raise BadRequest(f"{field}: token id {bad} is not in 0..{size - 1}", field=field)

    async def ids(self, prompt: Prompt, *, add_special_tokens: bool) -> tuple[int, ...]:
        if not isinstance(prompt, str):
            self.check_ids(prompt, "prompt")
            return prompt

        def encode() -> tuple[int, ...]:
            return self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)

        return await off_loop(encode, len(prompt))

    async def chat(self, chat: Chat) -> Rendered:
        """Raises `BadRequest` without a template, or when it refuses."""
        template = self._template
        if template is None:
            raise BadRequest(
                f"the model {self.model_name} has no chat template",
                field="messages",
                remedy=f"use /v1/completions, or put a {FILE} into the router's model folder",
            )
        num_chars = sum(len(turn.content) for turn in chat.turns)
        num_chars += sum(len(tool.given) for tool in chat.tools)
        return await off_loop(lambda: self._render(chat, template), num_chars)

    def _render(self, chat: Chat, template: ChatTemplate) -> Rendered:
        turns, tools = spelled_out(template, chat.turns, chat.tools, self.format.tools.write)
        text = template.render(
            turns,
            tools=tools,
            add_generation_prompt=chat.add_generation_prompt,
            variables={**chat.variables, **_effort(chat, template)},
        )
        ids = self.tokenizer.encode(text, add_special_tokens=chat.add_special_tokens)
        return Rendered(ids, thinking_after(text) if self.format.thinks else Thinking.OVER)


def _effort(chat: Chat, template: ChatTemplate) -> dict[str, object]:
    if chat.reasoning_effort is None:
        return {}
    if not template.knows("reasoning_effort"):
        raise BadRequest(
            "this model's chat template has no reasoning_effort",
            field="reasoning_effort",
            remedy="leave it out; a template's own switches are set by chat_template_kwargs",
        )
    return {"reasoning_effort": chat.reasoning_effort}


async def off_loop(work: Callable[[], T], num_chars: int) -> T:
    """``work`` here when there is little of it, else in a thread."""
    return await asyncio.to_thread(work) if num_chars > _INLINE_CHARS else work()
