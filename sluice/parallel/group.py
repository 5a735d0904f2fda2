"""What a model needs to know of the ranks that share it: how many, which one it is, and two collectives."""

from __future__ import annotations

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

    def agree(self, value: T) -> T:
        """Rank 0's value, on every rank. For small plain values (it is pickled), such as chosen tokens."""
        ...


class Single:
    """One rank: nothing to share, nothing to wait for."""

    rank = 0
    size = 1

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, axis: int = -1) -> Tensor:
        return x

    def agree(self, value: T) -> T:
        return value


SINGLE: Parallel = Single()
