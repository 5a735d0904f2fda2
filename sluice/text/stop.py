"""Stop strings over streamed text, wherever the token boundaries fall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sluice.text.partial import held_chars


@dataclass(frozen=True)
class Matched:
    """``text`` may be sent now; ``stop`` is the stop string that ended the answer, or None."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Cuts an answer before the first stop string that is completed.

    First completed, as if text came one character at a time, so the cut does not depend on how it
    was chunked; of several completed by the same character the longest wins. Text that may yet
    turn out to be the beginning of a stop string is held back. With ``include`` the cut is after
    the stop string.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str) -> Matched:
        """Add ``text``. After a match nothing more may be pushed."""
        buffer = self._held + text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0
        ]
        if found:
            end, at, stop = min(found)
            self._held = ""
            return Matched(buffer[: end if self._include else at], stop)
        keep = held_chars(buffer, self._stops)
        self._held = buffer[len(buffer) - keep :]
        return Matched(buffer[: len(buffer) - keep])

    def finish(self) -> str:
        """Text still held back when the answer ends otherwise."""
        held, self._held = self._held, ""
        return held
