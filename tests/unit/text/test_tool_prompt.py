"""Tools in prompts: by the template where it knows them, else in words."""

from __future__ import annotations

import json

from sluice.text.chat import ChatTemplate, Message
from sluice.text.reply.formats import TOOL_FORMATS, ToolFormatName
from sluice.text.tool_prompt import spelled_out
from sluice.text.tools import Call, Tool
from tests.unit.text.chatml import CHATML

_GIVEN = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
_TOOL = Tool("f", '{"type": "object"}', given=json.dumps(_GIVEN))
_CALL = Call("call_1", "f", '{"a": 1}')
_TURNS = [
    Message("user", "hi"),
    Message("assistant", "", tool_calls=(_CALL,)),
    Message("tool", "42", tool_call_id="call_1"),
]
_WRITE = TOOL_FORMATS[ToolFormatName.HERMES].write
_KNOWS = ChatTemplate(
    "{{ tools | tojson }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
    "{% if m.role == 'tool' %}{{ m.tool_call_id }}{% endif %}{% endfor %}",
    {},
)


def test_a_template_that_knows_tools_sees_them_as_the_client_wrote_them() -> None:
    turns, tools = spelled_out(_KNOWS, _TURNS, [_TOOL], _WRITE)
    assert list(turns) == _TURNS
    call = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": {"a": 1}}}
    assert _KNOWS.render(turns, tools=tools) == (
        f"{json.dumps([_GIVEN])}[user]hi[assistant]{json.dumps([call])}[tool]42call_1"
    )


def test_a_template_without_tools_gets_them_in_words() -> None:
    template = ChatTemplate(CHATML, {})
    turns, tools = spelled_out(template, _TURNS, [_TOOL], _WRITE)
    assert tools == ()
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
    assert json.dumps(_GIVEN) in turns[0].content
    assert "<tool_call>" in turns[0].content
    assert turns[2].content == _WRITE([_CALL])
    assert turns[3].content == "<tool_response>\n42\n</tool_response>"


def test_they_follow_the_clients_own_system_turn() -> None:
    turns, _ = spelled_out(
        ChatTemplate(CHATML, {}), [Message("system", "S"), *_TURNS], [_TOOL], _WRITE
    )
    assert [turn.role for turn in turns] == ["system", "user", "assistant", "user"]
    assert turns[0].content.startswith("S\n\nThese tools")


def test_arguments_that_are_no_object_stay_text() -> None:
    assert Call("c", "f", "[1]").fields()["function"]["arguments"] == "[1]"
    assert Call("c", "f", "{").fields()["function"]["arguments"] == "{"
