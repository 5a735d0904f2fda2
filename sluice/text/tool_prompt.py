"""Tools for templates that never heard of them: told in the system turn, calls and results as text.

DeepSeek V4 publishes no template, and many small chat models have one without tools. What they are told here is
ours; how they are to write a call is their family's format, which the answer is parsed by.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from sluice.text.chat import ChatTemplate, Message
from sluice.text.tools import Call, Tool

Write = Callable[[Sequence[Call]], str]
_EXAMPLE = Call("functions.tool_name:0", "tool_name", '{"argument": "value"}')


def spelled_out(
    template: ChatTemplate, turns: Sequence[Message], tools: Sequence[Tool], write: Write
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Turns and tools as ``template`` can show them."""
    shown = [_told(turn, template, write) for turn in turns]
    if not tools or template.knows("tools"):
        return tuple(shown), tuple(tools)
    told = _description(tools, write)
    first, rest = (shown[0], shown[1:]) if shown else (Message("system", ""), [])
    if first.role in ("system", "developer"):
        return (replace(first, content=f"{first.content}\n\n{told}"), *rest), ()
    return (Message("system", told), *shown), ()


def _told(turn: Message, template: ChatTemplate, write: Write) -> Message:
    if turn.role == "tool" and not template.knows("tool"):
        result = f"<tool_response>\n{turn.content}\n</tool_response>"
        return Message("user", result)
    if turn.tool_calls and not template.knows("tool_calls"):
        calls = write(turn.tool_calls)
        content = f"{turn.content}\n{calls}" if turn.content else calls
        return replace(turn, content=content, tool_calls=())
    return turn


def _description(tools: Sequence[Tool], write: Write) -> str:
    functions = "\n".join(json.dumps(tool.fields(), ensure_ascii=False) for tool in tools)
    return (
        f"These tools can be called, each described by a JSON schema:\n<tools>\n{functions}\n</tools>\n"
        f"To call one, write exactly this, with its name and arguments:\n{write([_EXAMPLE])}"
    )
