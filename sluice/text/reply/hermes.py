"""Calls as Hermes, Qwen3 and SmolLM2 write them: <tool_call>{"name": ..., "arguments": {...}}</tool_call>."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from sluice.text.reply.calls import Gained, Head, Markers, parsed
from sluice.text.reply.lark import Lark, arguments_schema
from sluice.text.tools import Call, Tool

MARKERS = Markers("<tool_call>", "</tool_call>")
_BREAK = "\n"
_HEAD = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
    r'\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


class HermesBody:
    """Passes the arguments' object on as it comes, when the name stands first; else waits for all."""

    def __init__(self) -> None:
        self._text = ""
        self._object: _ObjectEnd | None = None
        self._after = ""

    def push(self, text: str) -> Gained:
        if self._object is not None:
            return Gained(arguments=self._arguments(text))
        self._text += text
        match = _HEAD.match(self._text)
        name = parsed(match[1]) if match else None
        if match is None or not isinstance(name, str) or not name:
            return Gained()
        self._object = _ObjectEnd()
        return Gained(Head(name), self._arguments(self._text[match.end() :]))

    def finish(self, *, closed: bool) -> Gained:
        if self._object is not None:
            return Gained(stray=self._after.strip().removeprefix("}"))
        whole = parsed(self._text)
        if not isinstance(whole, dict) or not isinstance(whole.get("name"), str):
            return Gained()
        arguments = whole.get("arguments", whole.get("parameters", {}))
        if not whole["name"] or not isinstance(arguments, dict):
            return Gained()
        return Gained(Head(whole["name"]), json.dumps(arguments, ensure_ascii=False))

    def _arguments(self, text: str) -> str:
        assert self._object is not None
        end = self._object.push(text)
        self._after += text[end:]
        return text[:end]


class _ObjectEnd:
    """Finds the end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._over = False

    def push(self, text: str) -> int:
        """How many characters of ``text`` still belong to the object."""
        if self._over:
            return 0
        for at, char in enumerate(text):
            if self._in_string:
                self._string(char)
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self._over = True
                    return at + 1
        return len(text)

    def _string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False


def write(calls: Sequence[Call]) -> str:
    """``calls`` as the model would have written them."""
    return "\n".join(_write(call) for call in calls)


def _write(call: Call) -> str:
    return f"<tool_call>\n{_before_arguments(call.name)}{call.arguments}}}\n</tool_call>"


def _before_arguments(name: str) -> str:
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments": '


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    """Rule body of calls after the first marker. The name is fixed text, the arguments are JSON."""
    call = lark.any_call(
        f"{lark.text(_before_arguments(tool.name))} "
        f"{lark.json(arguments_schema(tool))} {lark.text('}')}"
        for tool in tools
    )
    rest = f"{lark.text(_BREAK)} {call} {lark.text(_BREAK + MARKERS.close)}"
    again = f" ({lark.text(_BREAK + MARKERS.open)} {rest})*" if many else ""
    return rest + again
