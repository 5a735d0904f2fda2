"""Grammars of tool calls: what they let through is read as calls of the tools, and nothing else gets through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from sluice.text.reply.formats import TOOL_FORMATS, ToolFormatName
from sluice.text.reply.lark import Lark
from sluice.text.reply.reasoning import Thinking
from sluice.text.tokenizer import ModelTokenizer
from sluice.text.tools import Call, Tool
from tests.unit.text.reply.answers import call_parser, read

_NAMES = [ToolFormatName.HERMES, ToolFormatName.DSML, ToolFormatName.KIMI]
_WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer"},
        "unit": {"$ref": "#/$defs/Unit"},
    },
    "required": ["city", "unit"],
    "additionalProperties": False,
    "$defs": {"Unit": {"enum": ["C", "F"]}},
}
_TOOLS = [Tool("weather", json.dumps(_WEATHER)), Tool("ping", "{}")]
_WEATHER_CALL = Call("functions.weather:0", "weather", '{"city": "Pa\\"ris", "unit": "C"}')
_TOKENIZER = Path(__file__).parents[4] / "models/tiny-dsv4/tokenizer.json"


@pytest.fixture
def text_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(_TOKENIZER))


def _accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    """Whether ``text`` is a whole sentence of the grammar."""
    matcher = LLMatcher(LLTokenizer(tokenizer.to_str()), LLMatcher.grammar_from_lark(grammar))
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def _forced(name: ToolFormatName, *, many: bool, thinking: Thinking = Thinking.OVER) -> str:
    lark = Lark({}, lenient=True)
    calls = TOOL_FORMATS[name].calls(_TOOLS, lark, many=many, free=False)
    return lark.whole(calls, thinking)


@pytest.mark.parametrize("name", _NAMES)
def test_forced_calls_are_what_the_parser_reads(
    name: ToolFormatName, text_tokenizer: Tokenizer
) -> None:
    text = TOOL_FORMATS[name].write([_WEATHER_CALL])
    assert _accepts(text_tokenizer, _forced(name, many=False), text)
    assert read(call_parser(name, eager=False), [text]).named() == [
        ("weather", json.loads(_WEATHER_CALL.arguments))
    ]


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize(
    "call",
    [
        Call("", "weather", '{"city": "x"}'),
        Call("", "weather", '{"city": "x", "unit": "K"}'),
        Call("", "weather", '{"city": "x", "days": "two", "unit": "C"}'),
        Call("", "other", "{}"),
    ],
)
def test_other_names_and_arguments_do_not_get_through(
    name: ToolFormatName, call: Call, text_tokenizer: Tokenizer
) -> None:
    text = TOOL_FORMATS[name].write([call])
    assert not _accepts(text_tokenizer, _forced(name, many=True), text)
    assert not _accepts(text_tokenizer, _forced(name, many=True), "Hello")


@pytest.mark.parametrize("name", _NAMES)
def test_parallel_calls_only_when_allowed(name: ToolFormatName, text_tokenizer: Tokenizer) -> None:
    text = TOOL_FORMATS[name].write([_WEATHER_CALL, Call("functions.ping:1", "ping", "{}")])
    assert _accepts(text_tokenizer, _forced(name, many=True), text)
    assert not _accepts(text_tokenizer, _forced(name, many=False), text)


@pytest.mark.parametrize("name", _NAMES)
def test_guarded_text_is_free_until_it_calls(
    name: ToolFormatName, text_tokenizer: Tokenizer
) -> None:
    format_ = TOOL_FORMATS[name]
    lark = Lark({}, lenient=True)
    calls = format_.calls(_TOOLS, lark, many=True, free=True)
    grammar = lark.whole(calls, Thinking.OVER)
    good = format_.write([_WEATHER_CALL])
    bad = format_.write([Call("", "weather", '{"town": 1}')])
    assert _accepts(text_tokenizer, grammar, "No < call\n at all.")
    assert _accepts(text_tokenizer, grammar, f"Let me see.\n{good}")
    assert not _accepts(text_tokenizer, grammar, f"Let me see.\n{bad}")


@pytest.mark.parametrize(
    ("thinking", "before", "accepted"),
    [
        (Thinking.OPEN, "hm\n</think>\n\n", True),
        (Thinking.OPEN, "", False),
        (Thinking.POSSIBLE, "<think>hm</think>", True),
        (Thinking.POSSIBLE, "", True),
        (Thinking.POSSIBLE, "hm</think>", False),
        (Thinking.OVER, "<think>hm</think>", False),
    ],
)
def test_reasoning_comes_first_where_the_prompt_allows_it(
    thinking: Thinking, before: str, accepted: bool, text_tokenizer: Tokenizer
) -> None:
    grammar = _forced(ToolFormatName.HERMES, many=True, thinking=thinking)
    text = before + TOOL_FORMATS[ToolFormatName.HERMES].write([_WEATHER_CALL])
    assert _accepts(text_tokenizer, grammar, text) is accepted


def test_white_space_inside_json_is_bounded(text_tokenizer: Tokenizer) -> None:
    grammar = _forced(ToolFormatName.HERMES, many=True)
    good = TOOL_FORMATS[ToolFormatName.HERMES].write([_WEATHER_CALL])
    assert _accepts(text_tokenizer, grammar, good.replace(', "unit"', ',\n   "unit"'))
    assert not _accepts(
        text_tokenizer, grammar, good.replace(', "unit"', "," + 70 * " " + '"unit"')
    )


def test_special_tokens_are_named_by_id() -> None:
    lark = Lark({"<|tool_call_begin|>": 7, "</think>": 9}, lenient=True)
    assert lark.text("<|tool_call_begin|>functions.f:") == '<[7]> "functions.f:"'
    grammar = lark.whole("x: /a/".partition(" ")[2], Thinking.OPEN)
    assert "<[9]>" in grammar
    valid = LLMatcher.validate_grammar(LLMatcher.grammar_from_lark(grammar))
    assert valid == ""


def test_markers_are_the_tokens_that_the_library_takes_out_of_the_text(
    text_tokenizer: Tokenizer,
) -> None:
    """One for which we say otherwise makes a grammar that nothing can satisfy."""
    text_tokenizer.add_special_tokens([AddedToken("<|tool_call_begin|>", special=True)])
    text_tokenizer.add_tokens([AddedToken(text) for text in ("<think>", "</think>", "|DSML|")])
    ours = ModelTokenizer(text_tokenizer, (1,), None)
    theirs = LLTokenizer(text_tokenizer.to_str())
    added = [token.content for token in text_tokenizer.get_added_tokens_decoder().values()]
    ids = {text: text_tokenizer.token_to_id(text) for text in (*added, "a", "absent")}
    markers = ours.marker_ids(list(ids))
    assert markers == {t: i for t, i in ids.items() if i is not None and theirs.is_special_token(i)}
    assert "|DSML|" not in markers
    lark = Lark(markers, lenient=True)
    grammar = lark.whole(lark.text("yes"), Thinking.OPEN)
    assert _accepts(text_tokenizer, grammar, "hm</think>\nyes")
