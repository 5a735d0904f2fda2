"""``Parallel`` over torch's process groups: gloo for tensors on CPU, NCCL for CUDA.

The groups are made by hand and owned, not torch's global one: two engines in one process don't meet,
and tests run ranks as threads.
"""

from __future__ import annotations

import pickle
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sluice.errors import RankLost

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

T = TypeVar("T")
_c10d: Any = dist  # torch re-exports these classes without saying so to type checkers
_LOOPBACK = "127.0.0.1"


class TorchGroup:
    """One rank's end. ``timeout_s`` bounds every collective and the wait for all ranks at the start."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: str = "cpu",
        timeout_s: float = 60.0,
    ) -> None:
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        self._control = _gloo(_c10d.PrefixStore("control", store), rank, size, timeout)
        self._tensors: Any = self._control
        if torch.device(device).type == "cuda":
            self._tensors = _nccl(_c10d.PrefixStore("tensors", store), rank, size, timeout)

    def all_reduce(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._wait("all_reduce", lambda: self._group(x).allreduce([x]))
        return x

    def all_gather(self, x: Tensor, axis: int = -1) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._wait("all_gather", lambda: self._group(x).allgather([parts], [x]))
        return torch.cat(parts, dim=axis)

    def agree(self, value: T) -> T:
        """Two broadcasts, of a length and of a pickle. Both ends are processes of one pod."""
        leads = self.rank == 0
        data = pickle.dumps(value) if leads else b""
        length = torch.tensor([len(data)])
        self._broadcast(length)
        buffer = torch.zeros(int(length), dtype=torch.uint8)
        if leads:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self._broadcast(buffer)
        if leads:
            return value
        agreed: T = pickle.loads(buffer.numpy().tobytes())
        return agreed

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


def leader_store() -> TCPStore:
    """A rendezvous on loopback, on a port of the system's choice (``.port``)."""
    store: TCPStore = _c10d.TCPStore(_LOOPBACK, 0, None, True, wait_for_workers=False)
    return store


def follower_store(port: int) -> TCPStore:
    store: TCPStore = _c10d.TCPStore(_LOOPBACK, port, None, False)
    return store


def _gloo(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [_c10d.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    return _c10d.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    options = _c10d.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return _c10d.ProcessGroupNCCL(store, rank, size, options)
