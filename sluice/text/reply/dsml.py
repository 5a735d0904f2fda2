"""Calls as DeepSeek V3.2 and V4 write them: DSML, one parameter at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from sluice.text.reply.calls import Gained, Head, Markers, parsed
from sluice.text.reply.lark import Lark, arguments_schema
from sluice.text.tools import Call, Tool

_TAG = "\uff5cDSML\uff5c"  # full-width bars
SECTION, SECTION_END = f"<{_TAG}tool_calls>", f"</{_TAG}tool_calls>"
PARAMETER, PARAMETER_END = f'<{_TAG}parameter name="', f"</{_TAG}parameter>"
# V3.2 calls its section function_calls; the rest is the same.
MARKERS = Markers(
    open=f'<{_TAG}invoke name="',
    close=f"</{_TAG}invoke>",
    sections=(SECTION, f"<{_TAG}function_calls>"),
    ends=(SECTION_END, f"</{_TAG}function_calls>"),
)
_SHARED = ("$defs", "definitions")  # what a property may refer to
_NOTES = frozenset({"title", "description", "default", "examples"})
_BREAK = "\n"
_TEXT, _JSON = '" string="true">', '" string="false">'
_NAME = re.compile(r'([^"<>]+)"\s*>')
_PARAMETER = re.compile(
    rf'\s*{PARAMETER}([^"]*)"(?:\s+string="(true|false)")?\s*>(.*?){PARAMETER_END}', re.DOTALL
)


class DsmlBody:
    """Arguments become JSON parameter by parameter. ``string="true"`` is text, else a JSON value."""

    def __init__(self) -> None:
        self._text = ""
        self._named = False
        self._parameters = 0

    def push(self, text: str) -> Gained:
        self._text += text
        head = None
        if not self._named:
            match = _NAME.match(self._text)
            if match is None:
                return Gained()
            self._named = True
            head = Head(match[1])
            self._text = self._text[match.end() :]
        return Gained(head, self._parameters_done())

    def finish(self, *, closed: bool) -> Gained:
        """An unclosed call stays without its brace: parameters may be missing."""
        if not self._named or not closed:
            return Gained()
        return Gained(arguments="}" if self._parameters else "{}", stray=self._text)

    def _parameters_done(self) -> str:
        done = ""
        while (match := _PARAMETER.match(self._text)) is not None:
            name, string, value = match.groups()
            done += ", " if self._parameters else "{"
            done += f"{_json(name)}: {_value(value, string)}"
            self._parameters += 1
            self._text = self._text[match.end() :]
        return done


def _value(text: str, string: str | None) -> str:
    """JSON of a parameter. Without the attribute, what parses is JSON; what doesn't parse is a string."""
    if string != "true" and (parsed(text) is not None or text.strip() == "null"):
        return text.strip()
    return _json(text)


def _json(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write(calls: Sequence[Call]) -> str:
    """``calls`` as the model would have written them."""
    return "\n".join([SECTION, *map(_write, calls), SECTION_END])


def _write(call: Call) -> str:
    arguments = parsed(call.arguments)
    values = arguments if isinstance(arguments, dict) else {}
    lines = [_invoke(call.name).lstrip()]
    for name, value in values.items():
        string = isinstance(value, str)
        text = value if string else json.dumps(value, ensure_ascii=False)
        flag = "true" if string else "false"
        lines.append(f'{PARAMETER}{name}" string="{flag}">{text}{PARAMETER_END}')
    return "\n".join([*lines, MARKERS.close])


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    """Rule body of calls after the section's marker."""
    call = lark.any_call(
        f"{lark.text(_invoke(tool.name))} {_parameters(arguments_schema(tool), lark)}"
        f"{lark.text(_BREAK + MARKERS.close)}"
        for tool in tools
    )
    return f"({call}){'+' if many else ''} {lark.text(_BREAK + SECTION_END)}"


def _invoke(name: str) -> str:
    return f'{_BREAK}{MARKERS.open}{name}">'


def _parameters(schema: dict[str, Any], lark: Lark) -> str:
    """The schema's properties in their order; any parameters when it doesn't list them."""
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        any_name = f"{lark.text(_BREAK + PARAMETER)} /[A-Za-z0-9_.-]{{1,64}}/ "
        return f"({any_name}{_json_value({}, lark)})* "
    required = schema.get("required") or []
    shared: dict[str, Any] = {key: schema[key] for key in _SHARED if key in schema}
    rules = ""
    for name, value in properties.items():
        values = lark.rule("value", " | ".join(_values(value, shared, lark)))
        begin = lark.text(f"{_BREAK}{PARAMETER}{name}")
        rules += f"({begin} {values})" + (" " if name in required else "? ")
    return rules


def _values(schema: Any, shared: dict[str, Any], lark: Lark) -> list[str]:
    """The ways to write a value, from behind its name: strings as text, all else as JSON."""
    if not isinstance(schema, dict):
        return [_json_value(schema, lark)]
    schema = _resolved(schema, shared)
    branches = schema.get("anyOf")
    if isinstance(branches, list) and {*schema} - _NOTES == {"anyOf"}:
        return [way for branch in branches for way in _values(branch, shared, lark)]
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(choices, list) and choices and all(isinstance(one, str) for one in choices):
        return [lark.text(f"{_TEXT}{one}{PARAMETER_END}") for one in choices]
    if {*schema} - _NOTES == {"type"} and schema["type"] == "string":
        return [f"{lark.text(_TEXT)} {lark.until(PARAMETER_END)}"]
    return [_json_value({**schema, **shared}, lark)]


def _json_value(schema: Any, lark: Lark) -> str:
    return f"{lark.text(_JSON)} {lark.json(schema)} {lark.text(PARAMETER_END)}"


def _resolved(schema: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """What a lone reference to a shared definition stands for."""
    match str(schema.get("$ref", "")).split("/"):
        case ["#", kind, name] if {*schema} - _NOTES == {"$ref"}:
            found = shared.get(kind, {}).get(name)
            return found if isinstance(found, dict) and "$ref" not in found else schema
    return schema
