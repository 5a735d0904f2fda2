"""Answers of a given form: ``response_format`` and ``structured_outputs`` to grammars."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict, Field, field_validator

from services.router.openai.policy import CheckedBody
from sluice.errors import BadRequest
from sluice.grammar.language import check
from sluice.text.reply.lark import Lark, guided
from sluice.text.reply.reasoning import Thinking
from sluice.types import Grammar, GrammarKind

_FIELD = "response_format"
SCHEMA_FIELD = "response_format.json_schema.schema"
_FORMAT_SCHEMA: dict[str, Any] = {
    "if": {"properties": {"type": {"const": "json_schema"}}},
    "then": {"properties": {"json_schema": {"type": "object"}}, "required": ["json_schema"]},
}
_FORMS: dict[str, Any] = {
    "json": {"type": "object"},
    "regex": {"type": "string"},
    "choice": {"type": "array"},
    "grammar": {"type": "string"},
    "json_object": {"const": True},
}
_STRUCTURED_SCHEMA: dict[str, Any] = {
    "oneOf": [{"properties": {name: form}, "required": [name]} for name, form in _FORMS.items()]
}


class JsonSchema(CheckedBody):
    """``strict`` refuses schemas with keywords that can't be guaranteed; else those are passed over."""

    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema", json_schema_extra={"type": "object"})
    strict: bool | None = None


class ResponseFormat(CheckedBody):
    model_config = ConfigDict(json_schema_extra=_FORMAT_SCHEMA)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(CheckedBody):
    """vLLM's extension: exactly one of these."""

    model_config = ConfigDict(json_schema_extra=_STRUCTURED_SCHEMA)

    json_: Any = Field(default=None, alias="json", json_schema_extra={"type": "object"})
    regex: str | None = None
    choice: list[str] | None = Field(
        default=None, min_length=1, json_schema_extra={"items": {"minLength": 1}}
    )
    grammar: str | None = None
    json_object: bool | None = None

    @field_validator("choice")
    @classmethod
    def _usable_choices(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and not all(value):
            raise ValueError("a choice is empty")
        return value


@dataclass(frozen=True)
class Opening:
    """Where the grammar takes over; ``special`` are the spellings of special tokens, with their ids."""

    thinking: Thinking = Thinking.OVER
    special: Mapping[str, int] = field(default_factory=dict)


def format_schema(format_: ResponseFormat | None) -> tuple[Any, bool] | None:
    """The JSON schema that answers must match, and whether strictly; None for free text."""
    if format_ is None or format_.type == "text":
        return None
    if format_.type == "json_object":
        return {"type": "object"}, True
    if format_.json_schema is None:
        raise BadRequest("json_schema is missing", field=f"{_FIELD}.json_schema")
    schema = format_.json_schema.schema_
    return {"type": "object"} if schema is None else schema, bool(format_.json_schema.strict)


def answer_grammar(
    format_: ResponseFormat | None, structured: StructuredOutputs | None, opening: Opening
) -> Grammar | None:
    """Of an answer without tools. Raises `BadRequest` naming the field at fault."""
    schema = format_schema(format_)
    if structured is not None:
        if schema is not None:
            raise BadRequest(
                "structured_outputs and response_format exclude each other",
                field="structured_outputs",
            )
        return _structured_grammar(structured, opening)
    if schema is None:
        return None
    return _schema_grammar(schema[0], SCHEMA_FIELD, schema[1], opening)


def schema_text(schema: Any, field: str, *, strict: bool) -> str:
    """``schema`` as JSON text. Raises `BadRequest` naming ``field`` for one that can't be followed."""
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        text = json.dumps(guided(schema, lenient=not strict))
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"{field}: is no JSON schema: {error}", field=field) from error
    check_grammar(Grammar(GrammarKind.JSON_SCHEMA, text), field)
    return text


def _schema_grammar(schema: Any, field: str, strict: bool, opening: Opening) -> Grammar:
    """Of an answer that is JSON."""
    text = schema_text(schema, field, strict=strict)
    if opening.thinking is Thinking.OVER:
        return Grammar(GrammarKind.JSON_SCHEMA, text)
    lark = Lark(opening.special, lenient=not strict)
    return Grammar(GrammarKind.LARK, lark.whole(lark.json(schema), opening.thinking))


def _structured_grammar(body: StructuredOutputs, opening: Opening) -> Grammar:
    name = "structured_outputs"
    forms = {
        "json": body.json_,
        "regex": body.regex,
        "choice": body.choice,
        "grammar": body.grammar,
    }
    given = [form for form, value in forms.items() if value is not None]
    if len(given) + bool(body.json_object) != 1:
        raise BadRequest(f"{name} needs exactly one form", field=name)
    if body.json_object:
        return _schema_grammar({"type": "object"}, name, True, opening)
    if body.json_ is not None:
        return _schema_grammar(body.json_, f"{name}.json", True, opening)
    if body.regex is not None:
        grammar = Grammar(GrammarKind.REGEX, body.regex)
    elif body.choice is not None:
        lark = Lark(opening.special, lenient=False)
        choices = " | ".join(json.dumps(one, ensure_ascii=False) for one in body.choice)
        grammar = Grammar(GrammarKind.LARK, lark.whole(choices, opening.thinking))
    else:
        grammar = Grammar(GrammarKind.LARK, body.grammar or "")
    check_grammar(grammar, f"{name}.{given[0]}")
    return grammar


def check_grammar(grammar: Grammar, field: str) -> None:
    """Raises `BadRequest` naming ``field`` for a text that doesn't compile."""
    try:
        check(grammar)
    except BadRequest as error:
        raise BadRequest(f"{field}: {error.message}", field=field) from error
