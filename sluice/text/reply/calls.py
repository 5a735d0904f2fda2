"""Tool calls between markers: what all chat formats have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.text.partial import first_marker, held_chars
from sluice.text.reply.parts import CallArguments, CallStart, Content, Part


@dataclass(frozen=True)
class Head:
    """A call's name; ``id`` when the model writes ids itself."""

    name: str
    id: str | None = None


@dataclass(frozen=True)
class Gained:
    """What a piece of a call's text gave: its head once, then arguments; ``stray`` is neither."""

    head: Head | None = None
    arguments: str = ""
    stray: str = ""


class CallBody(Protocol):
    """Reads the text of one call between its markers."""

    def push(self, text: str) -> Gained: ...

    def finish(self, *, closed: bool) -> Gained:
        """At the closing marker, or without one at the end of the answer."""
        ...


@dataclass(frozen=True)
class Markers:
    """``sections`` opens groups of calls and ``ends`` closes them; some formats have none."""

    open: str
    close: str
    sections: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()

    @property
    def outside(self) -> tuple[str, ...]:
        return (self.open, *self.sections, *self.ends)


class CallParser:
    """Content and calls. What turns out to be no call is content, markers and all.

    ``eager`` hands out arguments as they are written, for a stream; else a call is handed out once it is
    complete and its arguments are a JSON object. White space around calls is layout, not content.
    """

    def __init__(
        self,
        markers: Markers,
        new_body: Callable[[], CallBody],
        new_id: Callable[[], str],
        *,
        eager: bool,
    ) -> None:
        self._markers = markers
        self._new_body = new_body
        self._new_id = new_id
        self._eager = eager
        self._buffer = ""
        self._layout = ""  # may turn out to be content
        self._after_call = False
        self._calls = 0
        self._call: _OpenCall | None = None

    def push(self, text: str) -> Sequence[Part]:
        self._buffer += text
        parts: list[Part] = []
        while self._inside(parts) if self._call is not None else self._outside(parts):
            pass
        return parts

    def finish(self) -> Sequence[Part]:
        parts: list[Part] = []
        rest, self._buffer = self._buffer, ""
        if self._call is not None:
            self._feed(self._call, rest, parts)
            self._close(self._call, "", parts)
        else:
            self._content(rest, parts)
        if not self._after_call:
            self._flush(parts)
        return parts

    def _outside(self, parts: list[Part]) -> bool:
        """Whether there is more to do with what is there."""
        found = first_marker(self._buffer, self._markers.outside)
        if found is None:
            keep = held_chars(self._buffer, self._markers.outside)
            text = self._buffer[: len(self._buffer) - keep]
            self._buffer = self._buffer[len(text) :]
            self._content(text, parts)
            return False
        at, marker = found
        self._content(self._buffer[:at], parts)
        self._buffer = self._buffer[at + len(marker) :]
        if marker == self._markers.open:
            self._call = _OpenCall(self._new_body(), self._calls)
        elif marker in self._markers.ends and self._after_call:
            self._layout = ""
        else:
            self._layout += marker
        return True

    def _inside(self, parts: list[Part]) -> bool:
        assert self._call is not None
        close = self._markers.close
        text, closed, rest = self._buffer.partition(close)
        if closed:
            self._buffer = rest
            self._feed(self._call, text, parts)
            self._close(self._call, close, parts)
            return True
        keep = held_chars(text, (close,))
        self._buffer = text[len(text) - keep :]
        self._feed(self._call, text[: len(text) - keep], parts)
        return False

    def _content(self, text: str, parts: list[Part]) -> None:
        solid = text.rstrip()
        if not solid:
            self._layout += text
            return
        self._flush(parts)
        parts.append(Content(solid))
        self._layout = text[len(solid) :]
        self._after_call = False

    def _flush(self, parts: list[Part]) -> None:
        if self._layout:
            parts.append(Content(self._layout))
        self._layout = ""

    def _feed(self, call: _OpenCall, text: str, parts: list[Part]) -> None:
        call.text += text
        self._gain(call, call.body.push(text), parts)

    def _gain(self, call: _OpenCall, gained: Gained, parts: list[Part]) -> None:
        new: list[Part] = []
        if gained.head is not None:
            call.head = gained.head
            new.append(CallStart(call.index, gained.head.id or self._new_id(), gained.head.name))
        if gained.arguments:
            call.arguments += gained.arguments
            new.append(CallArguments(call.index, gained.arguments))
        if not self._eager:
            call.waiting += new
        elif new:
            self._count(call)
            parts += new

    def _close(self, call: _OpenCall, marker: str, parts: list[Part]) -> None:
        self._call = None
        gained = call.body.finish(closed=bool(marker))
        self._gain(call, gained, parts)
        if call.head is None or (not self._eager and not is_object(call.arguments)):
            self._content(self._markers.open + call.text + marker, parts)
            return
        if call.waiting:
            self._count(call)
            parts += call.waiting
        if gained.stray.strip():
            self._content(gained.stray, parts)

    def _count(self, call: _OpenCall) -> None:
        """The call is real: what stood before it was layout."""
        self._layout = ""
        self._after_call = True
        self._calls = call.index + 1


class _OpenCall:
    """A call whose closing marker hasn't come."""

    def __init__(self, body: CallBody, index: int) -> None:
        self.body = body
        self.index = index
        self.text = ""
        self.head: Head | None = None
        self.arguments = ""
        self.waiting: list[Part] = []


def is_object(text: str) -> bool:
    """Whether ``text`` is a JSON object."""
    return isinstance(parsed(text), dict)


def parsed(text: str) -> Any:
    """The JSON value of ``text``; None when it is no JSON."""
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None


def _refuse_constant(name: str) -> Any:
    """Python reads NaN and Infinity, which are no JSON."""
    raise ValueError(name)
