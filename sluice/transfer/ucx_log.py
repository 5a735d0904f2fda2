"""What UCX says while it works: which transport it chose for writes to a peer, and its own complaints.

UCX tells this to its log only, so its log goes to a file in memory and is read from there.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

log = logging.getLogger("ucx")

_FILE, _TABLES = "UCX_LOG_FILE", "UCX_PROTO_INFO"
_PREFIX = re.compile(r"^\[[\d.]+\] \[[^]]*\]\s*")
_WHO = re.compile(r"^\| (?P<agent>\S+) (?P<scope>self|intra-node|inter-node) cfg#\d+")
_WRITE = "remote memory write by"
_ROW = re.compile(r"^\| *[\w.]+\.\.(?P<to>\w+) *\| *(?P<how>[^|]*?) *\| *(?P<what>[^|]*?) *\|$")


class UcxLog:
    """Of this process: UCX has one. Only the thread that makes NIXL's calls may read it."""

    def __init__(self) -> None:
        self._file = os.memfd_create("ucx-log")
        self._read = 0
        self._tail = ""
        # Of the table that is being read; empty where it is about this process itself.
        self._agent = ""
        self._writes = False
        self._ways: dict[str, list[str]] = {}  # transports for writes, by agent as UCX calls it

    @property
    def path(self) -> str:
        return f"/proc/self/fd/{self._file}"

    def transports(self, agent_name: str) -> tuple[str, ...]:
        """What this agent's writes to other processes go over; several when peers are reached in several ways.

        Empty before the first peer, and where the environment sends UCX's log elsewhere.
        """
        self._catch_up()
        # UCX cuts long names.
        found = [ways for name, ways in self._ways.items() if agent_name.startswith(name)]
        return tuple(dict.fromkeys(way for ways in found for way in ways))

    def _catch_up(self) -> None:
        ctypes.CDLL(None).fflush(None)  # UCX leaves lines in its buffer
        size = os.fstat(self._file).st_size
        text = self._tail + os.pread(self._file, size - self._read, self._read).decode(
            errors="replace"
        )
        self._read = size
        *lines, self._tail = text.split("\n")
        for line in lines:
            self._take(_PREFIX.sub("", line))

    def _take(self, line: str) -> None:
        """A table says first whose it is, then for what, then how, by size; a rule of dashes between."""
        if who := _WHO.match(line):
            self._agent = "" if who["scope"] == "self" else who["agent"]
            self._writes = False
        elif _WRITE in line:
            self._writes = True
        elif row := _ROW.match(line):
            if self._agent and self._writes and row["to"] == "inf":  # the row for large writes
                self._ways.setdefault(self._agent, []).append(row["what"])
        elif line and not line.startswith(("|", "+")):
            log.warning("%s", line)


@functools.cache
def ucx_log() -> UcxLog:
    return UcxLog()


@contextmanager
def settings(*, captured: bool) -> Iterator[None]:
    """Around the loading of UCX, which reads its environment then and once; without a word it would log to stdout.

    ``captured``: to `ucx_log`, with the tables it reads; else to stderr. An operator's own setting wins. Names are
    taken back, since a child process can't open this one's file.
    """
    wanted = {_FILE: "stderr"}
    if captured and _TABLES not in os.environ and hasattr(os, "memfd_create"):
        wanted = {_FILE: ucx_log().path, _TABLES: "*put*"}
    if _FILE in os.environ:
        wanted = {}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name in wanted:
            del os.environ[name]
