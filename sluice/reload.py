"""A value read from files: read again when they change, kept when the new content is no good."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from sluice.errors import ConfigError
from sluice.telemetry.logging import get_logger

T = TypeVar("T")
_Look = tuple[tuple[int, int, int] | None, ...]
_log = get_logger(__name__)


class Reloaded(Generic[T]):
    """``read`` is called at once and again when any of ``files`` has changed; threads may share this.

    ``read`` raises `ConfigError` or OSError for content that can't be used: the constructor passes that on; later the
    last good value stays, and the log says so once for each change.
    """

    def __init__(self, what: str, files: Sequence[Path], read: Callable[[], T]) -> None:
        self._what = what
        self._files = tuple(files)
        self._read = read
        self._lock = threading.Lock()
        self._seen = _look(self._files)
        self._value = read()

    def get(self) -> T:
        """The newest good value."""
        with self._lock:
            now = _look(self._files)
            if now != self._seen:
                self._reload(now)
            return self._value

    def _reload(self, before: _Look) -> None:
        try:
            value = self._read()
        except (ConfigError, OSError) as error:
            self._seen = before
            _log.error("reload_failed", what=self._what, error=str(error), kept="the last good one")
            return
        if _look(self._files) != before:
            return  # written while it was read, perhaps half of it: the next look reads it again
        self._seen, self._value = before, value
        _log.info("reloaded", what=self._what)


def _look(files: Sequence[Path]) -> _Look:
    """What changes when a file is written, replaced, or reached through another link."""
    seen: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            found = file.stat()
        except OSError:
            seen.append(None)
        else:
            seen.append((found.st_mtime_ns, found.st_size, found.st_ino))
    return tuple(seen)
