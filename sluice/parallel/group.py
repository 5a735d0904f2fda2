"""What a model needs to know of the ranks that share it: how many, which one it is, and two collectives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from torch import Tensor

T = TypeVar("T")


class Parallel(Protocol):
    """The ranks of one pod. All of them must make the same collective calls in the same order.

    Every rank gets the same bits. Raises ``RankLost`` when another rank is gone or doesn't come.
    """

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks. ``x`` may be overwritten."""
        ...

    def all_gather(self, x: Tensor, axis: int = -1) -> Tensor:
        """The ranks' tensors, all of one shape, side by side along ``axis`` in rank order."""
        ...

    def decide(self, choose: Callable[[], T]) -> T:
        """What ``choose`` gives on rank 0, on every rank; the others don't call it.

        For small plain values (they are pickled), such as chosen tokens. When it raises, it raises there
        and ``RankLost`` everywhere else.
        """
        ...


class Single:
    """One rank: nothing to share, nothing to wait for."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, axis: int = -1) -> Tensor:
        return x

    def decide(self, choose: Callable[[], T]) -> T:
        return choose()


SINGLE: Parallel = Single()
