"""A watched file of pods: replaced, rewritten in place, broken, deleted."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from services.discovery.file import FileSource
from services.discovery.registry import PodState, Registry

pytestmark = pytest.mark.asyncio
LOOK_S = 0.05
ONE = "- {role: decode, address: '10.0.0.1:7000'}\n"
TWO = ONE + "- {role: prefill, address: '10.0.0.2:7000', state: draining, name: p-0}\n"


@pytest_asyncio.fixture
async def watched(tmp_path: Path) -> AsyncIterator[tuple[Path, Registry]]:
    path, registry = tmp_path / "pods.yaml", Registry()
    path.write_text(ONE)
    task = asyncio.create_task(FileSource(path, LOOK_S).watch(registry))
    await until(lambda: len(registry.view.pods) == 1)
    yield path, registry
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    os.replace(other, path)


async def test_a_replaced_file_is_the_new_fleet(watched: tuple[Path, Registry]) -> None:
    path, registry = watched
    replace(path, TWO)
    await until(lambda: len(registry.view.pods) == 2)
    prefill = registry.view.pods[1]
    assert (prefill.state, prefill.name) == (PodState.DRAINING, "p-0")
    replace(path, json.dumps([{"role": "decode", "address": "[::1]:7000"}]))
    await until(lambda: [pod.address for pod in registry.view.pods] == ["[::1]:7000"])
    replace(path, "[]")
    await until(lambda: registry.view.pods == ())


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "no list of pods"),
        ("- {role: decode, address: '10.0.0.1", "expected"),
        ("- {role: decode, address: nohost}", "entry 0.address"),
        (ONE + "- {role: cook, address: 'a:1'}", "entry 1.role"),
        ("- {role: aggregated, address: 'a:1'}", "prefill or decode"),
        ("- {role: decode, address: 'a:1', stat: ready}", "entry 0.stat"),
    ],
)
async def test_a_bad_file_keeps_the_last_good_view_and_says_so(
    watched: tuple[Path, Registry], text: str, problem: str
) -> None:
    path, registry = watched
    replace(path, text)
    await until(lambda: bool(registry.view.problem))
    assert problem in registry.view.problem
    assert str(path) in registry.view.problem
    assert [pod.address for pod in registry.view.pods] == ["10.0.0.1:7000"]
    replace(path, TWO)
    await until(lambda: len(registry.view.pods) == 2)
    assert registry.view.problem == ""


async def test_a_deleted_file_keeps_the_view_until_it_is_back(
    watched: tuple[Path, Registry],
) -> None:
    path, registry = watched
    path.unlink()
    await until(lambda: "No such file" in registry.view.problem)
    assert len(registry.view.pods) == 1
    path.write_text(TWO)
    await until(lambda: len(registry.view.pods) == 2)


async def test_a_file_that_is_being_written_is_not_taken_for_a_shorter_list(
    watched: tuple[Path, Registry],
) -> None:
    """Cut between two entries it is a good list of fewer pods."""
    path, registry = watched
    sizes = set[int]()
    registry.listen(lambda view: sizes.add(len(view.pods)))
    many = "".join(f"- {{role: decode, address: '10.0.1.{n}:1'}}\n" for n in range(12))
    with path.open("w") as out:
        for line in many.splitlines(keepends=True):
            out.write(line)
            out.flush()
            await asyncio.sleep(LOOK_S / 5)
    await until(lambda: len(registry.view.pods) == 12)
    assert sizes == {1, 12}
