"""The registry: versions, listeners, and the last good view."""

from __future__ import annotations

import pytest

from services.discovery.registry import (
    PodRecord,
    PodState,
    Registry,
    RegistryView,
    keep_watching,
)
from sluice.types import Role

A = PodRecord(Role.DECODE, "a:1")
B = PodRecord(Role.PREFILL, "b:1")


def test_a_listener_has_heard_before_replace_returns() -> None:
    registry, heard = Registry(), list[RegistryView]()
    registry.listen(heard.append)
    registry.replace([A, B])
    assert [view.version for view in heard] == [0, 1]
    assert heard[-1].of(Role.DECODE) == {"a:1": A}
    registry.replace([B, A])
    assert len(heard) == 2, "nothing changed"
    registry.replace([B])
    assert heard[-1].pods == (B,)


def test_trouble_keeps_the_view_and_a_good_look_ends_it() -> None:
    registry = Registry()
    registry.replace([A])
    registry.trouble("the API is down")
    assert registry.view.pods == (A,)
    assert (registry.view.version, registry.view.problem) == (1, "the API is down")
    registry.replace([A])
    assert (registry.view.version, registry.view.problem) == (1, "")


def test_of_two_records_of_one_pod_the_last_counts() -> None:
    registry = Registry()
    draining = PodRecord(Role.DECODE, "a:1", PodState.DRAINING)
    registry.replace([A, draining])
    assert registry.view.pods == (draining,)


@pytest.mark.asyncio
async def test_a_source_that_dies_says_so() -> None:
    class Broken:
        async def watch(self, registry: Registry) -> None:
            raise KeyError("bug")

    registry = Registry()
    await keep_watching(Broken(), registry)
    assert "KeyError" in registry.view.problem
