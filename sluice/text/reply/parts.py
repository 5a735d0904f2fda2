"""The parts of an answer, in the order they were written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Content:
    """What the reader sees."""

    text: str


@dataclass(frozen=True)
class Reasoning:
    """What the model thought before it answered."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A tool call begins. ``index`` counts calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """The next piece of a call's arguments, which joined are a JSON object."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class ReplyParser(Protocol):
    """Text in, as it comes; parts out, the same whatever the pieces were."""

    def push(self, text: str) -> Sequence[Part]: ...

    def finish(self) -> Sequence[Part]:
        """What was held back. Nothing may be pushed afterwards."""
        ...
