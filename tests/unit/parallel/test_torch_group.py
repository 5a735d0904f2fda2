"""Collectives: sums, order, one rank's decision, and what the others see when a rank is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sluice.errors import RankLost
from sluice.parallel.group import Parallel
from sluice.parallel.torch_group import TorchGroup
from tests.unit.parallel.ranks import run_ranks


@pytest.mark.parametrize("size", [1, 2, 4])
def test_sum_and_order(size: int) -> None:
    def work(group: Parallel) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.full((2, 3), float(group.rank + 1))
        return group.all_gather(x, axis=1), group.all_reduce(x)

    for gathered, summed in run_ranks(size, work):
        assert gathered[0].tolist() == [float(r + 1) for r in range(size) for _ in range(3)]
        assert torch.equal(summed, torch.full((2, 3), size * (size + 1) / 2))


def test_every_rank_gets_the_same_bits() -> None:
    def work(group: Parallel) -> torch.Tensor:
        x = torch.randn(5000, generator=torch.Generator().manual_seed(group.rank))
        return group.all_reduce(x)

    first, *others = run_ranks(4, work)
    assert all(torch.equal(first, other) for other in others)


def test_rank_0_decides_and_nobody_else_is_asked() -> None:
    def work(group: Parallel) -> list[int]:
        def choose() -> list[int]:
            assert group.rank == 0
            return [7, 8]

        return group.decide(choose)

    assert run_ranks(3, work) == [[7, 8]] * 3


def test_a_failed_decision_reaches_every_rank() -> None:
    def work(group: Parallel) -> str:
        try:
            group.decide(lambda: 1 // 0)
        except (ZeroDivisionError, RankLost) as error:
            return type(error).__name__
        return "decided"

    assert run_ranks(2, work) == ["ZeroDivisionError", "RankLost"]


def test_rank_skips_a_collective() -> None:
    """The others don't hang: they get a typed error when its time is up."""

    def work(group: Parallel) -> str:
        if group.rank == 1:
            return "skipped"
        with pytest.raises(RankLost, match="all_reduce on rank 0 of 2") as caught:
            group.all_reduce(torch.ones(1))
        return caught.value.code

    assert run_ranks(2, work, timeout_s=1.0) == ["RankLost", "skipped"]


def test_a_rank_that_never_comes(tmp_path: Path) -> None:
    with pytest.raises(RankLost, match="rank 0 of 2"):
        TorchGroup(tmp_path / "ranks", 0, 2, timeout_s=0.5)
