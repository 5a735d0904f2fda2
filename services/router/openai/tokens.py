"""``POST /tokenize`` and ``POST /detokenize``: the ids that a prompt becomes, and the way back."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, ClassVar

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field, field_validator

from services.router.openai.chat_schema import Chat
from services.router.openai.errors import ANSWERS
from services.router.openai.intake import Intake, warn_ignored
from services.router.openai.messages import ChatMessage
from services.router.openai.policy import TEMPLATE_OFF, CheckedBody, Off, Whole, checked_text
from services.router.openai.tool_schema import ToolBody
from sluice.errors import BadRequest

_EITHER: dict[str, Any] = {
    "oneOf": [
        {"properties": {"prompt": {"type": "string"}}, "required": ["prompt"]},
        {"properties": {"messages": {"type": "array"}}, "required": ["messages"]},
    ],
    "examples": [{"prompt": "Hello"}, {"messages": [{"role": "user", "content": "Hello?"}]}],
}


class TokenizeRequest(CheckedBody):
    """Either ``prompt`` or ``messages``; special tokens are added to a prompt unless told otherwise."""

    model_config = ConfigDict(json_schema_extra=_EITHER)
    off: ClassVar[Off] = TEMPLATE_OFF

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    tools: list[ToolBody] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _valid_text(cls, value: str | None) -> str | None:
        return None if value is None else checked_text(value)


class Tokenized(BaseModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(CheckedBody):
    model: str | None = None
    tokens: list[Whole] = Field(json_schema_extra={"items": {"type": "integer", "minimum": 0}})


class Detokenized(BaseModel):
    """``prompt`` shows special tokens, so that tokenizing it again gives the same ids."""

    prompt: str


def token_routes(intake: Intake) -> APIRouter:
    routes = APIRouter()

    @routes.post("/tokenize", responses=ANSWERS)
    async def tokenize(body: TokenizeRequest) -> Tokenized:
        warn_ignored(body)
        intake.check_model(body.model)
        ids = await _ids(intake, body)
        spell = intake.tokenizer.token_text
        return Tokenized(
            count=len(ids),
            max_model_len=intake.max_model_tokens() or None,
            tokens=list(ids),
            token_strs=[spell(id_) for id_ in ids] if body.return_token_strs else None,
        )

    @routes.post("/detokenize", responses=ANSWERS)
    async def detokenize(body: DetokenizeRequest) -> Detokenized:
        warn_ignored(body)
        intake.check_model(body.model)
        intake.prompts.check_ids(body.tokens, "tokens")
        decode = partial(intake.tokenizer.decode, skip_special_tokens=False)
        return Detokenized(prompt=await asyncio.to_thread(decode, body.tokens))

    return routes


async def _ids(intake: Intake, body: TokenizeRequest) -> tuple[int, ...]:
    if (body.prompt is None) == (body.messages is None):
        raise BadRequest("send either prompt or messages", field="prompt")
    if body.messages is not None:
        tools = [tool.tool() for tool in body.tools or ()]
        return (await intake.prompts.chat(Chat.of(body.messages, tools, body))).ids
    assert body.prompt is not None
    special = body.add_special_tokens is not False
    return await intake.prompts.ids(body.prompt, add_special_tokens=special)
