"""The W3C trace context of the current task, as text: it travels in gRPC metadata whether or not anybody records it."""

from __future__ import annotations

from collections.abc import Iterable
from contextvars import ContextVar

KEY = "traceparent"
_MAX_CHARS = 128  # the standard's is 55; a longer one is somebody's mistake
_current: ContextVar[str] = ContextVar("traceparent", default="")


def current() -> str:
    return _current.get()


def set_current(value: str) -> None:
    """For this task and those it starts; of odd text nothing is kept."""
    _current.set(value if len(value) <= _MAX_CHARS and value.isascii() else "")


def outgoing() -> tuple[tuple[str, str], ...]:
    """Metadata for a call that this task makes."""
    value = _current.get()
    return ((KEY, value),) if value else ()


def incoming(metadata: Iterable[tuple[str, str | bytes]]) -> None:
    """Take the context over from a call's metadata."""
    found = [value for key, value in metadata if key == KEY]
    value = found[0] if found else ""
    set_current(value if isinstance(value, str) else "")
