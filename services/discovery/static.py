"""Pods named in the settings: they never change."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.discovery.registry import PodRecord, Registry
from sluice.types import Role


class StaticSource:
    def __init__(self, *, prefills: Iterable[str] = (), decodes: Iterable[str] = ()) -> None:
        self._pods = tuple(PodRecord(Role.PREFILL, address) for address in prefills) + tuple(
            PodRecord(Role.DECODE, address) for address in decodes
        )

    async def watch(self, registry: Registry) -> None:
        registry.replace(self._pods)
        await asyncio.Event().wait()
