"""A grammar in llguidance's dialect of Lark, put together rule by rule."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from sluice.grammar.language import JSON_WHITESPACE
from sluice.text.reply.reasoning import CLOSE, OPEN, Thinking
from sluice.text.tools import Tool


def guided(schema: Any, *, lenient: bool) -> Any:
    """``schema`` with llguidance's options. ``lenient`` passes over keywords it doesn't know."""
    options = {"whitespace_pattern": JSON_WHITESPACE, "lenient": lenient}
    schema = {} if schema is True else schema
    return {**schema, "x-guidance": options} if isinstance(schema, dict) else schema


def arguments_schema(tool: Tool) -> dict[str, Any]:
    """What a call's arguments must be: always an object."""
    return {"type": "object", **tool.schema()}


class Lark:
    """Rules so far. ``special`` are the spellings of special tokens, which no text can match, with their ids."""

    def __init__(self, special: Mapping[str, int], *, lenient: bool) -> None:
        self._special = dict(special)
        self._lenient = lenient
        self._rules: list[str] = []
        spellings = sorted(self._special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, spellings))})") if spellings else None

    def rule(self, kind: str, body: str) -> str:
        """A new rule; its name."""
        name = f"{kind}_{len(self._rules)}"
        self._rules.append(f"{name}: {body}")
        return name

    def any_call(self, bodies: Iterable[str]) -> str:
        """A rule of one call to any tool, each of which has one of ``bodies``; its name."""
        return self.rule("body", " | ".join([self.rule("call", body) for body in bodies]))

    def text(self, text: str) -> str:
        """Exactly this text; a special token's spelling is that token."""
        pieces = self._split.split(text) if self._split else [text]
        return " ".join(self._piece(piece) for piece in pieces if piece)

    def json(self, schema: Any) -> str:
        schema_text = json.dumps(guided(schema, lenient=self._lenient))
        return self.rule("json", f"%json {schema_text}")

    def until(self, end: str) -> str:
        """Any text up to and including the first ``end``."""
        if end in self._special:
            return f"/(?s:.*)/ {self.text(end)}"
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[suffix={_quoted(end)}]: /(?s:.*)/")
        return name

    def seek(self, marker: str) -> str:
        """Any text up to and including the first ``marker``, where other rules allow any text too."""
        if marker in self._special:
            return f"/(?s:.*)/ {self.text(marker)}"
        name = f"seek_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: /(?s:.*)/ {_quoted(marker)}")
        return name

    def whole(self, answer: str, thinking: Thinking) -> str:
        """The grammar of ``answer``, after the reasoning that may come first."""
        if thinking is not Thinking.OVER:
            breaks = self.rule("breaks", r"/\n{1,2}/")
            thought = f"{self.until(CLOSE)} {breaks}?"
            if thinking is Thinking.POSSIBLE:
                thought = f"({self.text(OPEN)} {thought})?"
            answer = f"{thought} ({answer})"
        return "\n".join([f"start: {answer}", *self._rules, ""])

    def _piece(self, text: str) -> str:
        return f"<[{self._special[text]}]>" if text in self._special else _quoted(text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
