"""Calls as Kimi K2 and Kimi Linear write them: a section of calls, each with an id like functions.name:0."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sluice.text.reply.calls import Gained, Head, Markers
from sluice.text.reply.lark import Lark, arguments_schema
from sluice.text.tools import Call, Tool

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ARGUMENTS = "<|tool_call_argument_begin|>"
MARKERS = Markers("<|tool_call_begin|>", "<|tool_call_end|>", (SECTION,), (SECTION_END,))
_OWN_ID = re.compile(r"functions\..+:\d+")
_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?", re.DOTALL)


class KimiBody:
    """An id, a marker, and the arguments' text."""

    def __init__(self) -> None:
        self._head = ""
        self._found = False
        self._begun = False
        self._space = ""

    def push(self, text: str) -> Gained:
        if self._found:
            return Gained(arguments=self._arguments(text))
        self._head += text
        id_, marker, rest = self._head.partition(ARGUMENTS)
        match = _ID.fullmatch(id_.strip())
        if not marker or match is None:
            return Gained()
        self._found = True
        return Gained(Head(match["name"], id_.strip()), self._arguments(rest))

    def finish(self, *, closed: bool) -> Gained:
        return Gained()

    def _arguments(self, text: str) -> str:
        """White space next to the markers belongs to them, so it waits."""
        text = self._space + text if self._begun else text.lstrip()
        solid = text.rstrip()
        self._space = text[len(solid) :]
        self._begun = self._begun or bool(solid)
        return solid


def write(calls: Sequence[Call]) -> str:
    """``calls`` as the model would have written them."""
    return SECTION + "".join(map(_write, calls)) + SECTION_END


def _write(call: Call) -> str:
    id_ = call.id if _OWN_ID.fullmatch(call.id) else f"functions.{call.name}:0"
    return f"{MARKERS.open}{id_}{ARGUMENTS}{call.arguments}{MARKERS.close}"


def grammar(tools: Sequence[Tool], many: bool, lark: Lark) -> str:
    """Rule body of calls after the section's marker."""
    call = lark.any_call(
        f"{lark.text(f'{MARKERS.open}functions.{tool.name}:')} /[0-9]{{1,4}}/ "
        f"{lark.text(ARGUMENTS)} {lark.json(arguments_schema(tool))} "
        f"{lark.text(MARKERS.close)}"
        for tool in tools
    )
    return f"({call}){'+' if many else ''} {lark.text(SECTION_END)}"
