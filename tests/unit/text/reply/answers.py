"""Answers of every format, and what parsing makes of them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from sluice.text.reply.calls import CallParser
from sluice.text.reply.formats import TOOL_FORMATS, ToolFormatName
from sluice.text.reply.parts import (
    CallArguments,
    CallStart,
    Content,
    Part,
    Reasoning,
    ReplyParser,
)


@dataclass
class Reply:
    """All parts of one answer put together."""

    content: str = ""
    reasoning: str = ""
    calls: list[list[str]] = field(default_factory=list)  # id, name, arguments

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Reply:
        reply = cls()
        for part in parts:
            match part:
                case Content(text):
                    reply.content += text
                case Reasoning(text):
                    reply.reasoning += text
                case CallStart(index, id_, name):
                    assert index == len(reply.calls)
                    reply.calls.append([id_, name, ""])
                case CallArguments(index, text):
                    reply.calls[index][2] += text
        return reply

    def named(self) -> list[tuple[str, object]]:
        """Name and arguments of every call."""
        return [(name, json.loads(arguments)) for _, name, arguments in self.calls]


def call_parser(name: ToolFormatName, *, eager: bool) -> CallParser:
    format_ = TOOL_FORMATS[name]
    ids = map("call_{}".format, itertools.count())
    return CallParser(format_.markers, format_.new_body, lambda: next(ids), eager=eager)


def read(parser: ReplyParser, pieces: Sequence[str]) -> Reply:
    parts = [part for piece in pieces for part in parser.push(piece)]
    return Reply.of([*parts, *parser.finish()])


def cut(text: str, at: Iterable[int]) -> list[str]:
    """``text`` in pieces."""
    bounds = sorted({0, len(text), *(point % (len(text) + 1) for point in at)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)] or [""]
