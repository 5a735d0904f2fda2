"""The languages grammars are written in, as llguidance reads them. Needs no tokenizer and no torch."""

from __future__ import annotations

import json

from llguidance import LLMatcher

from sluice.errors import BadRequest
from sluice.types import Grammar, GrammarKind

MAX_GRAMMAR_BYTES = 1 << 20
# Between two pieces of JSON: what one line or an indented document has. A model in doubt may otherwise write blanks or
# empty lines until its tokens are used up.
JSON_WHITESPACE = r"(?:[\x20\x09]{1,2}|\x0D?\x0A[\x20\x09]{0,32})"


def check(grammar: Grammar) -> None:
    """Raises ``BadRequest`` that says what is wrong with the text."""
    problem = LLMatcher.validate_grammar(to_llguidance(grammar)).strip()
    if problem and not problem.startswith("WARNING"):
        raise refused(problem.splitlines()[0])


def to_llguidance(grammar: Grammar) -> str:
    """Raises ``BadRequest`` for what can be refused without compiling."""
    if len(grammar.text.encode()) > MAX_GRAMMAR_BYTES:
        raise refused(f"it has more than {MAX_GRAMMAR_BYTES} bytes")
    match grammar.kind:
        case GrammarKind.JSON_SCHEMA:
            return _json(_parsed(grammar.text))
        case GrammarKind.JSON_OBJECT:
            return _json({"type": "object"})
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.LARK:
            return LLMatcher.grammar_from_lark(grammar.text)


def _json(schema: dict[str, object]) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_pattern": JSON_WHITESPACE}
    )


def _parsed(text: str) -> dict[str, object]:
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refused(f"the schema is not JSON: {error}") from None
    if not isinstance(schema, dict):
        raise refused(f"the schema is a {type(schema).__name__}, must be an object")
    return schema


def refused(reason: str) -> BadRequest:
    return BadRequest(f"the grammar can't be used: {reason}", field="grammar")
