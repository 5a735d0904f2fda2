"""An answer's parts as a chat's message, or as what one chunk adds to it."""

from __future__ import annotations

from collections.abc import Sequence

from services.router.openai.chat_schema import AnswerMessage, Delta
from services.router.openai.tool_schema import AnsweredCall, CallDelta, CalledFunction
from sluice.text.reply.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    ReplyParser,
)


class Reading:
    """One answer being read. Without a parser all of it is content."""

    def __init__(self, parser: ReplyParser | None) -> None:
        self._parser = parser
        self.called = False

    def push(self, text: str, *, ends: bool) -> list[Part]:
        if self._parser is None:
            return [Content(text)] if text else []
        parts = list(self._parser.push(text))
        if ends:
            parts += self._parser.finish()
        self.called = self.called or any(isinstance(part, CallStart) for part in parts)
        return parts


def message(parts: Sequence[Part]) -> AnswerMessage:
    """A whole message. Content is null when there are only calls."""
    content, reasoning = _text(parts, Content), _text(parts, Reasoning)
    calls = [
        AnsweredCall(
            id=start.id,
            type="function",
            function=CalledFunction(name=start.name, arguments=_arguments(parts, start.index)),
        )
        for start in parts
        if isinstance(start, CallStart)
    ]
    answer = AnswerMessage(
        role="assistant", content=None if calls and not content else content, refusal=None
    )
    if reasoning:
        answer.reasoning_content = reasoning
    if calls:
        answer.tool_calls = calls
    return answer


def delta(parts: Sequence[Part], *, opens: bool = False) -> Delta:
    """What ``parts`` add. The chunk that opens a choice has the role and no text."""
    if opens:
        return Delta(role="assistant", content="")
    change = Delta()
    if content := _text(parts, Content):
        change.content = content
    if reasoning := _text(parts, Reasoning):
        change.reasoning_content = reasoning
    if calls := _call_deltas(parts):
        change.tool_calls = calls
    return change


def _call_deltas(parts: Sequence[Part]) -> list[CallDelta]:
    """One entry a call, in order."""
    deltas: dict[int, CallDelta] = {}
    for part in parts:
        if isinstance(part, CallStart):
            function = CalledFunction(name=part.name, arguments="")
            deltas[part.index] = CallDelta(
                index=part.index, id=part.id, type="function", function=function
            )
        elif isinstance(part, CallArguments) and part.index not in deltas:
            deltas[part.index] = CallDelta(
                index=part.index, function=CalledFunction(arguments=part.text)
            )
        elif isinstance(part, CallArguments):
            function = deltas[part.index].function
            function.arguments = (function.arguments or "") + part.text
    return list(deltas.values())


def _text(parts: Sequence[Part], kind: type[Content] | type[Reasoning]) -> str:
    return "".join(part.text for part in parts if isinstance(part, kind))


def _arguments(parts: Sequence[Part], index: int) -> str:
    pieces = [p.text for p in parts if isinstance(p, CallArguments) and p.index == index]
    return "".join(pieces)
