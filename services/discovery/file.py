"""Pods named in a file that is watched: replace it, and the fleet changes.

The file is a YAML or JSON list, one entry a pod::

    - {role: prefill, address: 10.0.0.5:7000}
    - {role: decode, address: 10.0.0.6:7000, state: draining, name: decode-3}

A file that can't be read or is wrong in any entry changes nothing and is reported. It is read only when it looked the
same twice in a row, so that one that is being written in place isn't taken for a shorter list; replacing it with a
rename needs no such luck.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.discovery.registry import PodRecord, PodState, Registry
from services.environment import split_address
from sluice.types import Role

_LOOK_EVERY_S = 0.25
Seen = tuple[int, int, int]  # inode, size, modification time in ns


def _host_and_port(address: str) -> str:
    split_address(address)
    return address


def _pod_role(role: Role) -> Role:
    if role is Role.AGGREGATED:
        raise ValueError("a pod's role is prefill or decode")
    return role


class _Entry(BaseModel):
    model_config = ConfigDict(extra="forbid")

    role: Annotated[Role, AfterValidator(_pod_role)]
    address: Annotated[str, AfterValidator(_host_and_port)]
    state: PodState = PodState.READY
    name: str = ""


_ENTRIES = TypeAdapter(list[_Entry])


class FileSource:
    """``look_every_s`` is how often the file's date is looked at."""

    def __init__(self, path: Path, look_every_s: float = _LOOK_EVERY_S) -> None:
        self._path = path
        self._look_every_s = look_every_s

    async def watch(self, registry: Registry) -> None:
        taken: Seen | None = None
        before: Seen | None = None
        while True:
            seen = self._look(registry)
            if seen is not None and seen == before and seen != taken:
                taken = seen
                self._take(registry)
            before = seen
            await asyncio.sleep(self._look_every_s)

    def _look(self, registry: Registry) -> Seen | None:
        try:
            return self._seen()
        except OSError as error:
            registry.trouble(f"discovery file {self._path}: {error.strerror}")
            return None

    def _take(self, registry: Registry) -> None:
        try:
            registry.replace(self._read())
        except (OSError, ValueError, yaml.YAMLError) as error:
            registry.trouble(f"discovery file {self._path}: {_short(error)}")

    def _seen(self) -> Seen:
        status = self._path.stat()
        return status.st_ino, status.st_size, status.st_mtime_ns

    def _read(self) -> list[PodRecord]:
        """Raises ValueError with the first wrong entry."""
        content = yaml.safe_load(self._path.read_text(encoding="utf-8"))
        if not isinstance(content, list):
            raise ValueError("it holds no list of pods (an empty list is [])")
        entries = _ENTRIES.validate_python(content)
        return [PodRecord(e.role, e.address, e.state, e.name) for e in entries]


def _short(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        return f"entry {place}: {first['msg']}, got {first['input']!r}"
    return str(error)
