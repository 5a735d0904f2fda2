"""Ranks as threads of this process: the real collectives, without starting processes."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from sluice.errors import RankLost
from sluice.parallel.group import SINGLE, Parallel
from sluice.parallel.torch_group import TorchGroup, subgroup

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[Parallel], T], timeout_s: float = 30.0) -> list[T]:
    """What ``work`` gives on each of ``size`` ranks, in rank order; raises what went wrong on any."""
    if size == 1:
        return [work(SINGLE)]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(size) as pool:

        def one(rank: int) -> T:
            meeting = Path(folder) / "ranks"
            return work(TorchGroup(meeting, rank, size, timeout_s=timeout_s))

        running = [pool.submit(one, rank) for rank in range(size)]
        wait(running)
    errors = [error for done in running if (error := done.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, RankLost)):
        raise error  # the cause, not what the others saw of it
    return [done.result() for done in running]


def run_contexts(
    size: int, context: int, work: Callable[[Parallel, Parallel], T], timeout_s: float = 30.0
) -> list[T]:
    """The same where every ``context`` neighbours are a group of their own, given as the second argument."""

    def both(group: Parallel) -> T:
        if not isinstance(group, TorchGroup):
            return work(group, group)
        return work(group, subgroup(group, context, device="cpu", timeout_s=timeout_s))

    return run_ranks(size, both, timeout_s)
