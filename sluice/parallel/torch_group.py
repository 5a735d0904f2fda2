"""``Parallel`` over torch's process groups: gloo for tensors on CPU, NCCL for CUDA.

The groups are made by hand and owned, not torch's global one: two engines in one process don't meet,
and tests run ranks as threads.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sluice.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

T = TypeVar("T")
_c10d: Any = dist  # torch re-exports these classes without saying so to type checkers
_LOOPBACK = "127.0.0.1"
_FAILED = -1  # a length that says that nothing follows


class TorchGroup:
    """One rank's end. The ranks find each other through ``meeting``, a file that only they can write, which
    is empty or doesn't exist yet; groups of other ``name`` may share it. ``timeout_s`` bounds that and every
    collective.

    Raises ``RankLost`` when not all of them come.
    """

    def __init__(
        self,
        meeting: Path,
        rank: int,
        size: int,
        *,
        device: str = "cpu",
        timeout_s: float = 60.0,
        name: str = "all",
    ) -> None:
        self.meeting = meeting
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        file = _c10d.FileStore(str(meeting))
        file.set_timeout(timeout)
        store = _c10d.PrefixStore(name, file)
        try:
            self._control = _gloo(_c10d.PrefixStore("control", store), rank, size, timeout)
            self._tensors: Any = self._control
            if torch.device(device).type == "cuda":
                self._tensors = _nccl(_c10d.PrefixStore("tensors", store), rank, size, timeout)
        except RuntimeError as error:
            raise RankLost(
                f"rank {rank} of {size} didn't meet the others within {timeout_s} s: {error}",
                stage="parallel",
                remedy="look at the other ranks' logs",
            ) from error

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait("all_reduce", lambda: self._group(x).allreduce([x]))
        return x

    def all_gather(self, x: Tensor, axis: int = -1) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait("all_gather", lambda: self._group(x).allgather([parts], [x]))
        return torch.cat(parts, dim=axis)

    def decide(self, choose: Callable[[], T]) -> T:
        """Two broadcasts, of a length and of a pickle. Both ends are processes of one pod."""
        if self.rank == 0:
            try:
                value = choose()
            except BaseException:
                self._broadcast(torch.tensor([_FAILED]))
                raise
            data = bytearray(pickle.dumps(value))
            self._broadcast(torch.tensor([len(data)]))
            self._broadcast(torch.frombuffer(data, dtype=torch.uint8))
            return value
        length = torch.tensor([0])
        self._broadcast(length)
        if length == _FAILED:
            raise RankLost("rank 0 could not decide; its log says why", stage="parallel")
        buffer = torch.empty(int(length), dtype=torch.uint8)
        self._broadcast(buffer)
        decided: T = pickle.loads(buffer.numpy().tobytes())
        return decided

    def _group(self, x: Tensor) -> Any:
        return self._tensors if x.is_cuda else self._control

    def _broadcast(self, x: Tensor) -> None:
        self._wait("broadcast", lambda: self._control.broadcast(x, 0))

    def _wait(self, what: str, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:  # gloo and NCCL know no finer types
            raise RankLost(
                f"{what} on rank {self.rank} of {self.size} failed: {error}",
                stage="parallel",
                remedy="restart the pod: its ranks can't be brought together again",
            ) from error


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, rank, size, options)


def subgroup(group: TorchGroup, size: int, *, device: str, timeout_s: float) -> TorchGroup:
    """The group of ``size`` neighbours that this rank belongs to; the whole one where that is all of them."""
    if size == group.size:
        return group
    number, rank = divmod(group.rank, size)
    name = f"{size}-{number}"
    return TorchGroup(group.meeting, rank, size, device=device, timeout_s=timeout_s, name=name)
