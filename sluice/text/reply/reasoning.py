"""Reasoning between <think> and </think>, as DeepSeek, Qwen3 and Kimi write it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from sluice.text.partial import held_chars
from sluice.text.reply.parts import Content, Part, Reasoning

OPEN, CLOSE = "<think>", "</think>"
MARKERS = (OPEN, CLOSE)


class Thinking(Enum):
    """Where a prompt leaves the model."""

    POSSIBLE = auto()  # the answer may open with <think>
    OPEN = auto()  # the prompt ended with <think>
    OVER = auto()  # the prompt ended with </think>, or this model doesn't think


def thinking_after(prompt: str) -> Thinking:
    """How a rendered prompt of a thinking model leaves it."""
    tail = prompt.rstrip()
    if tail.endswith(OPEN):
        return Thinking.OPEN
    return Thinking.OVER if tail.endswith(CLOSE) else Thinking.POSSIBLE


class ReasoningParser:
    """Splits an answer in two. Line breaks next to the markers belong to them.

    Only the very beginning of an answer can be reasoning: a later <think> is content.
    """

    def __init__(self, thinking: Thinking) -> None:
        self._state = thinking
        self._buffer = ""
        self._fresh = thinking is Thinking.OPEN  # nothing but line breaks since a marker

    def push(self, text: str) -> Sequence[Part]:
        self._buffer += text
        parts: list[Part] = []
        if self._state is Thinking.POSSIBLE:
            self._begin()
        if self._state is Thinking.OPEN:
            self._think(parts)
        if self._state is Thinking.OVER:
            self._answer(parts)
        return parts

    def finish(self) -> Sequence[Part]:
        """An answer that was cut while thinking is all reasoning."""
        text, self._buffer = self._buffer, ""
        if not text:
            return ()
        return (Reasoning(text) if self._state is Thinking.OPEN else Content(text),)

    def _begin(self) -> None:
        start = self._buffer.lstrip()
        if start.startswith(OPEN):
            self._buffer = start[len(OPEN) :]
            self._state = Thinking.OPEN
            self._fresh = True
        elif not OPEN.startswith(start):
            self._state = Thinking.OVER

    def _think(self, parts: list[Part]) -> None:
        thought, closed, rest = self._buffer.partition(CLOSE)
        if closed:
            self._buffer = rest
            self._state = Thinking.OVER
            text = thought.rstrip("\n")
        else:
            open_end = len(thought) - held_chars(thought, (CLOSE,))
            text = thought[:open_end].rstrip("\n")
            self._buffer = thought[len(text) :]
        if self._fresh:
            dropped = text.lstrip("\n")
            if not closed and not dropped:
                self._buffer = self._buffer.lstrip("\n")
            text = dropped
        if text:
            self._fresh = False
            parts.append(Reasoning(text))
        if closed:
            self._fresh = True

    def _answer(self, parts: list[Part]) -> None:
        text, self._buffer = self._buffer, ""
        if self._fresh:
            text = text.lstrip("\n")
        if text:
            self._fresh = False
            parts.append(Content(text))
