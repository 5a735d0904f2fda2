"""Checkpoint tensors by canonical name: renamed, checked, cut to a rank's part, dequantised, all accounted for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from sluice.errors import CheckpointError
from sluice.models.quantised import dequantise_part, dequantised_shape, is_quantised, scale_shape
from sluice.models.safetensors_file import StoredTensor, open_folder
from sluice.parallel.cut import WHOLE, Cuts, cut
from sluice.parallel.group import SINGLE, Parallel

_SCALE_SUFFIX = ".scale"
_MAX_NAMES_SHOWN = 4
_TENSOR_DIGEST_BYTES = 16


class TensorSource(Protocol):
    """Where a model's weights come from: a checkpoint, or a trainer's parameters."""

    def has(self, name: str) -> bool: ...

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, cuts: Cuts = WHOLE
    ) -> Tensor:
        """The tensor, of exactly this shape, or the part of it that ``cuts`` name; ``wide`` keeps it in
        float32 in any model.
        """
        ...

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An integer tensor, int64."""
        ...


class Checkpoint:
    """A checkpoint folder as a ``TensorSource``.

    ``rename`` maps any stored name to its canonical one. Every complaint is a CheckpointError that
    names the tensor, what was expected, what was found, and the remedy.
    """

    def __init__(
        self,
        folder: Path,
        rename: Callable[[str], str],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self._folder = folder
        self._dtype = dtype
        self._device = torch.device(device)
        self._stored: dict[str, StoredTensor] = {}
        self._taken: set[str] = set()
        for name, tensor in open_folder(folder).items():
            canonical = rename(name)
            if canonical in self._stored:
                raise CheckpointError(
                    f"tensors {self._stored[canonical].name!r} and {name!r} are both {canonical!r}",
                    stage="load",
                    remedy="remove one of them from the checkpoint",
                )
            self._stored[canonical] = tensor

    def has(self, name: str) -> bool:
        return name in self._stored

    def take(
        self, name: str, shape: tuple[int, ...], *, wide: bool = False, cuts: Cuts = WHOLE
    ) -> Tensor:
        """Of a part, only its own pages of the file are read."""
        dtype = torch.float32 if wide else self._dtype
        stored = self._find(name, shape)
        if is_quantised(stored.dtype):
            values = self._dequantised(name, stored, shape, dtype, cuts)
        else:
            self._check_shape(name, stored.shape, shape)
            values = cut(stored.read(), cuts)
        # A clone, because a view of the file would page in slowly and keep the mapping alive.
        return values.to(self._device, dtype, copy=True)

    def take_ids(self, name: str, shape: tuple[int, ...]) -> Tensor:
        stored = self._find(name, shape)
        if stored.dtype.is_floating_point:
            raise CheckpointError(
                f"tensor {name!r} is {stored.dtype}, expected integers", stage="load"
            )
        self._check_shape(name, stored.shape, shape)
        return stored.read().to(self._device, torch.int64, copy=True)

    def finish(self, ignore: Callable[[str], bool] = lambda name: False) -> None:
        """Raise CheckpointError if tensors are left that nobody took or ``ignore`` excuses."""
        left = sorted(name for name in self._stored if name not in self._taken and not ignore(name))
        if left:
            shown = ", ".join(repr(self._stored[name].name) for name in left[:_MAX_NAMES_SHOWN])
            more = ", ..." if len(left) > _MAX_NAMES_SHOWN else ""
            raise CheckpointError(
                f"{len(left)} unexpected tensors in {self._folder.name!r}: {shown}{more}",
                stage="load",
                remedy="check that config.json belongs to this checkpoint",
            )

    def digest(
        self, chosen: Callable[[str], bool] = lambda name: True, parallel: Parallel = SINGLE
    ) -> str:
        """Hex digest of the chosen tensors as stored: canonical names, dtypes, shapes and bytes.

        A digest of one digest a tensor, so that each rank reads its share of the tensors, not all.
        """
        names = sorted(filter(chosen, self._stored))
        own = [self._digest_of(name) for name in names[parallel.rank :: parallel.size]]
        total = hashlib.blake2b(digest_size=16)
        for digest in _interleaved(own, len(names), parallel):
            total.update(digest)
        return total.hexdigest()

    def _digest_of(self, name: str) -> bytes:
        stored = self._stored[name]
        head = f"{name}|{stored.dtype}|{stored.shape}|".encode()
        one = hashlib.blake2b(head, digest_size=_TENSOR_DIGEST_BYTES)
        one.update(stored.raw())
        return one.digest()

    def names(self) -> Iterable[str]:
        """Canonical names, sorted."""
        return sorted(self._stored)

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        if name not in self._stored:
            raise CheckpointError(
                f"tensor {name!r} {list(shape)} is missing from {self._folder.name!r}",
                stage="load",
                remedy="check that config.json belongs to this checkpoint and all shards are there",
            )
        self._taken.add(name)
        return self._stored[name]

    def _dequantised(
        self,
        name: str,
        stored: StoredTensor,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        cuts: Cuts,
    ) -> Tensor:
        self._check_shape(name, dequantised_shape(stored.shape, stored.dtype), shape)
        scale_name = name.removesuffix(".weight") + _SCALE_SUFFIX
        expected = scale_shape(shape, stored.dtype)
        scale = self._find(scale_name, expected)
        self._check_shape(scale_name, scale.shape, expected)
        return dequantise_part(stored.read(), scale.read(), dtype, cuts, self._device)

    def _check_shape(self, name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
        if found != expected:
            raise CheckpointError(
                f"tensor {name!r} has shape {list(found)}, config.json asks for {list(expected)}",
                stage="load",
                remedy="use the config.json and the safetensors files of one checkpoint",
            )


def _interleaved(own: list[bytes], total: int, parallel: Parallel) -> list[bytes]:
    """Every tensor's digest, in order of names: rank r made those of names r, r + ranks, ..."""
    if parallel.size == 1:
        return own
    rows = -(-total // parallel.size)
    padded = b"".join(own).ljust(rows * _TENSOR_DIGEST_BYTES, b"\0")
    part = torch.frombuffer(bytearray(padded), dtype=torch.uint8).view(rows, 1, -1)
    everyone = parallel.all_gather(part, axis=1).flatten(0, 1)[:total]
    return [row.numpy().tobytes() for row in everyone]
