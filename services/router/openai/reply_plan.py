"""How a chat's answer must look and how it is read: tools, forms and reasoning together."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from services.router.openai.chat_schema import ChatRequest
from services.router.openai.structure import (
    SCHEMA_FIELD,
    Opening,
    answer_grammar,
    check_grammar,
    format_schema,
    schema_text,
)
from services.router.openai.tool_schema import ToolChoice
from sluice.errors import BadRequest
from sluice.text.reply.formats import ReplyFormat, ToolFormat
from sluice.text.reply.lark import Lark
from sluice.text.reply.parts import ReplyParser
from sluice.text.reply.reasoning import Thinking
from sluice.text.tokenizer import ModelTokenizer
from sluice.text.tools import Tool
from sluice.types import Grammar, GrammarKind

# What a client's schema can do to the code that walks it.
_ODD_SCHEMA = (AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class ReplyPlan:
    """``shown`` are special tokens whose spelling the parser must see."""

    format: ReplyFormat
    thinking: Thinking
    with_tools: bool
    grammar: Grammar | None
    shown: frozenset[int]

    def parser(self, *, eager: bool) -> ReplyParser | None:
        """For one answer; None when all of it is content."""
        return self.format.parser(
            self.thinking, with_tools=self.with_tools, eager=eager, new_id=_new_id
        )


def plan_reply(
    body: ChatRequest, format_: ReplyFormat, thinking: Thinking, tokenizer: ModelTokenizer
) -> ReplyPlan:
    """Raises `BadRequest` naming the field at fault."""
    tools = body.callable_tools()
    special = tokenizer.marker_ids(format_.spellings(with_tools=bool(tools)))
    return ReplyPlan(
        format=format_,
        thinking=thinking,
        with_tools=bool(tools),
        grammar=_grammar(body, tools, format_.tools, Opening(thinking, special)),
        shown=tokenizer.special_token_ids & {*special.values()},
    )


def _grammar(
    body: ChatRequest, tools: tuple[Tool, ...], format_: ToolFormat, opening: Opening
) -> Grammar | None:
    choice = body.choice_of_tools()
    with_schema = format_schema(body.response_format) is not None
    if tools and body.structured_outputs is not None:
        raise BadRequest("structured_outputs and tools exclude each other", field="tools")
    if not tools or not _must_guard(body, choice, tools, with_schema):
        return answer_grammar(body.response_format, body.structured_outputs, opening)
    _check_tools(tools)
    return _tool_grammar(body, choice, tools, format_, opening)


def _must_guard(
    body: ChatRequest, choice: ToolChoice, tools: tuple[Tool, ...], with_schema: bool
) -> bool:
    """Whether the model can't simply be trusted with its tools."""
    one_only = body.parallel_tool_calls is False
    return choice.forced or one_only or with_schema or any(tool.strict for tool in tools)


def _tool_grammar(
    body: ChatRequest,
    choice: ToolChoice,
    tools: tuple[Tool, ...],
    format_: ToolFormat,
    opening: Opening,
) -> Grammar:
    """Calls only, or calls where the model turns to them, or calls or else the wanted form."""
    if choice.kind == "function":
        tools = tuple(tool for tool in tools if tool.name == choice.name)
    many = body.parallel_tool_calls is not False and choice.kind != "function"
    schema = None if choice.forced else format_schema(body.response_format)
    if schema is not None:
        schema_text(schema[0], SCHEMA_FIELD, strict=schema[1])
    free = not choice.forced and schema is None
    lark = Lark(opening.special, lenient=not all(tool.strict for tool in tools))
    try:
        answer = format_.calls(tools, lark, many=many, free=free)
        if schema is not None:
            answer = f"{lark.json(schema[0])} | {answer}"
        grammar = Grammar(GrammarKind.LARK, lark.whole(answer, opening.thinking))
    except _ODD_SCHEMA as error:
        raise BadRequest(f"tools: a schema can't be followed: {error}", field="tools") from error
    check_grammar(grammar, "tools")
    return grammar


def _check_tools(tools: tuple[Tool, ...]) -> None:
    for rank, tool in enumerate(tools):
        field = f"tools[{rank}].function.parameters"
        schema = tool.schema()
        if schema.get("type", "object") != "object":
            raise BadRequest(f"{field}: must describe an object", field=field)
        schema_text(schema, field, strict=tool.strict)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"
