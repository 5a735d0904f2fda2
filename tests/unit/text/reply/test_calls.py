"""Tool calls of every format: read, written, cut anywhere, and broken ones that lose nothing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice.text.reply.dsml import SECTION
from sluice.text.reply.formats import TOOL_FORMATS, ToolFormatName
from sluice.text.reply.parts import CallArguments
from sluice.text.tools import Call
from tests.unit.text.reply.answers import Reply, call_parser, cut, read

_NAMES = [ToolFormatName.HERMES, ToolFormatName.DSML, ToolFormatName.KIMI]
_ARGUMENTS = st.dictionaries(
    st.text("abz_", min_size=1, max_size=5),
    st.none()
    | st.booleans()
    | st.integers(-9, 9)
    | st.text('ab"\\{}<>/ é\n', max_size=6)
    | st.lists(st.integers(), max_size=2)
    | st.dictionaries(st.text("xy", max_size=2), st.text('{}"', max_size=2), max_size=2),
    max_size=3,
)
_CUTS = st.lists(st.integers(0, 500), max_size=12)
_CALLS = st.lists(st.tuples(st.sampled_from(["f", "get_weather", "a.b-c"]), _ARGUMENTS), max_size=3)


def _calls(pairs: list[tuple[str, dict[str, object]]]) -> list[Call]:
    return [
        Call(f"functions.{name}:{rank}", name, json.dumps(arguments))
        for rank, (name, arguments) in enumerate(pairs)
    ]


@pytest.mark.parametrize("name", _NAMES)
@settings(max_examples=60, deadline=None)
@given(pairs=_CALLS, cuts=_CUTS, eager=st.booleans(), content=st.sampled_from(["", "Let me see."]))
def test_what_is_written_is_read_wherever_it_is_cut(
    name: ToolFormatName,
    pairs: list[tuple[str, dict[str, object]]],
    cuts: list[int],
    eager: bool,
    content: str,
) -> None:
    written = TOOL_FORMATS[name].write(_calls(pairs)) if pairs else ""
    text = content + ("\n\n" if content and pairs else "") + written
    reply = read(call_parser(name, eager=eager), cut(text, cuts))
    assert reply.named() == pairs
    assert reply.content == content
    ids = [id_ for id_, _, _ in reply.calls]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize("name", _NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data(), cuts=_CUTS)
def test_text_without_a_call_comes_back_whole(
    name: ToolFormatName, data: st.DataObject, cuts: list[int]
) -> None:
    format_ = TOOL_FORMATS[name]
    pieces = st.sampled_from(
        [*format_.spellings, *(s[:-2] for s in format_.spellings), " \n", "{", "x"]
    )
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    reply = read(call_parser(name, eager=False), cut(text, cuts))
    if not reply.calls:
        assert reply.content == text
    assert reply == read(call_parser(name, eager=False), [text]), "cuts change nothing"


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    ("name", "text"),
    [
        (ToolFormatName.HERMES, "a <tool_call>no JSON</tool_call> b"),
        (ToolFormatName.HERMES, '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        (ToolFormatName.HERMES, '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        (ToolFormatName.HERMES, '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
        (ToolFormatName.HERMES, '<tool_call>\n{"name": "f"'),
        (ToolFormatName.KIMI, "<|tool_call_begin|>functions.f:0{}<|tool_call_end|>"),
        (ToolFormatName.KIMI, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        (ToolFormatName.KIMI, "<|tool_calls_section_begin|> no call"),
        (ToolFormatName.DSML, f"{SECTION}\nno call"),
        (ToolFormatName.DSML, f'{SECTION}\n{TOOL_FORMATS[ToolFormatName.DSML].markers.open}">'),
    ],
)
def test_an_unparsable_call_is_content(name: ToolFormatName, text: str, eager: bool) -> None:
    assert read(call_parser(name, eager=eager), [text]) == Reply(content=text)


@pytest.mark.parametrize("name", _NAMES)
def test_a_call_with_broken_arguments_is_content_unless_it_was_streamed(
    name: ToolFormatName,
) -> None:
    good = TOOL_FORMATS[name].write([Call("functions.f:0", "f", '{"a": {"b": 12345}}')])
    text = good[: good.index("45")]
    assert read(call_parser(name, eager=False), [text]) == Reply(content=text)
    streamed = read(call_parser(name, eager=True), list(text))
    assert [call[1] for call in streamed.calls] == ["f"]


@pytest.mark.parametrize("name", _NAMES)
def test_a_stream_gets_arguments_before_the_call_ends(name: ToolFormatName) -> None:
    call = Call("functions.f:0", "f", json.dumps({"a": "x" * 40, "b": 1}))
    parser = call_parser(name, eager=True)
    text = TOOL_FORMATS[name].write([call])
    before_end = text[: text.index(TOOL_FORMATS[name].markers.close)]
    parts = [part for char in before_end for part in parser.push(char)]
    pieces = [part.text for part in parts if isinstance(part, CallArguments)]
    assert len(pieces) > 1
    assert "x" * 40 in "".join(pieces)


def test_hermes_keys_in_the_other_order_and_a_missing_end() -> None:
    text = '<tool_call>{"arguments": {"a": 1}, "name": "f"}'
    for eager in (False, True):
        assert read(call_parser(ToolFormatName.HERMES, eager=eager), [text]).named() == [
            ("f", {"a": 1})
        ]


def test_what_follows_a_hermes_call_inside_its_markers_is_content() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}} and more}</tool_call>'
    reply = read(call_parser(ToolFormatName.HERMES, eager=True), [text])
    assert (reply.named(), reply.content) == ([("f", {})], " and more}")


def test_nan_is_no_json() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'
    assert read(call_parser(ToolFormatName.HERMES, eager=False), [text]).calls == []


def test_kimi_keeps_the_models_own_ids() -> None:
    text = TOOL_FORMATS[ToolFormatName.KIMI].write([Call("functions.f:7", "f", "{}")])
    assert read(call_parser(ToolFormatName.KIMI, eager=True), [text]).calls == [
        ["functions.f:7", "f", "{}"]
    ]


def test_dsml_values_are_text_or_json_as_they_say() -> None:
    open_, tag = TOOL_FORMATS[ToolFormatName.DSML].markers.open, "\uff5cDSML\uff5c"
    body = "".join(
        f'<{tag}parameter name="{name}"{flag}>{value}</{tag}parameter>\n'
        for name, flag, value in [
            ("a", ' string="true"', "3"),
            ("b", ' string="false"', "3"),
            ("c", ' string="false"', "no JSON"),
            ("d", "", '{"x": [1]}'),
        ]
    )
    text = f'<{tag}function_calls>\n{open_}f">\n{body}</{tag}invoke>\n</{tag}function_calls>'
    expected = {"a": "3", "b": 3, "c": "no JSON", "d": {"x": [1]}}
    assert read(call_parser(ToolFormatName.DSML, eager=False), [text]).named() == [("f", expected)]
