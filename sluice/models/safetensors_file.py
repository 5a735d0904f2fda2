"""Memory-mapped reading of safetensors files: one file, or shards with an index.

Written against the format's specification: a tensor is a view of the mapping, its stored bytes can
be digested without copying, a damaged file gets a sentence, packed 4-bit values arrive as bytes.
"""

from __future__ import annotations

import json
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sluice.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit

_DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
}


@dataclass(frozen=True)
class StoredTensor:
    """One tensor's place in a mapped file. ``read`` copies nothing; the bytes are private to us."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    mapping: mmap.mmap
    offset_bytes: int
    size_bytes: int

    def raw(self) -> memoryview:
        return memoryview(self.mapping)[self.offset_bytes : self.offset_bytes + self.size_bytes]

    def read(self) -> Tensor:
        """The tensor as a view of the file (copy-on-write: writes never reach the disk)."""
        if self.size_bytes == 0:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(
            self.mapping, dtype=torch.uint8, count=self.size_bytes, offset=self.offset_bytes
        )
        if self.offset_bytes % self.dtype.itemsize:
            flat = flat.clone()  # a misaligned view can't be reinterpreted
        return flat.view(self.dtype).view(self.shape)


def open_folder(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder by its stored name.

    Raises CheckpointError when there is no checkpoint, a shard is missing, a file is not valid
    safetensors, or the index names a tensor that its shard does not have.
    """
    index_path = folder / INDEX_NAME
    if index_path.exists():
        return _open_shards(folder, index_path)
    if (folder / SINGLE_NAME).exists():
        return open_file(folder / SINGLE_NAME)
    raise CheckpointError(
        f"no checkpoint in {folder.name!r}: neither {SINGLE_NAME} nor {INDEX_NAME}",
        stage="load",
        remedy="point the model path at a folder with config.json and safetensors files",
    )


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file; see ``open_folder`` for errors."""
    try:
        with path.open("rb") as file:
            mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot map {path.name}: {error}", stage="load") from error
    header_bytes = int.from_bytes(mapping[:8], "little")
    data_start = 8 + header_bytes
    if header_bytes > _MAX_HEADER_BYTES or data_start > len(mapping):
        raise _broken(path, f"header of {header_bytes} bytes in a file of {len(mapping)}")
    try:
        header = json.loads(mapping[8:data_start])
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {
            name: _stored(path, mapping, data_start, name, entry) for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(path, f"unreadable header: {error!r}") from error


def _open_shards(folder: Path, index_path: Path) -> dict[str, StoredTensor]:
    try:
        shard_of: dict[str, str] = json.loads(index_path.read_text())["weight_map"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"unreadable {INDEX_NAME}: {error!r}", stage="load") from error
    tensors: dict[str, StoredTensor] = {}
    for shard in sorted(set(shard_of.values())):
        tensors |= open_file(folder / shard)
    for name, shard in shard_of.items():
        if name not in tensors:
            raise CheckpointError(
                f"{INDEX_NAME} puts tensor {name!r} into {shard}, which does not have it",
                stage="load",
                remedy="copy the checkpoint again",
            )
    return tensors


def _stored(
    path: Path, mapping: mmap.mmap, data_start: int, name: str, entry: dict[str, object]
) -> StoredTensor:
    shape, offsets, type_name = entry["shape"], entry["data_offsets"], str(entry["dtype"])
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    if type_name == "F4":  # two values a byte along the last dimension; we see bytes, as published
        dtype, shape = torch.uint8, [*shape[:-1], shape[-1] // 2]
    elif type_name in _DTYPES:
        dtype = _DTYPES[type_name]
    else:
        raise CheckpointError(
            f"tensor {name!r} in {path.name} has unknown dtype {type_name!r}", stage="load"
        )
    begin, end = offsets
    expected_bytes = math.prod(shape) * dtype.itemsize
    if end - begin != expected_bytes or data_start + end > len(mapping):
        raise _broken(
            path, f"tensor {name!r} claims bytes {begin}..{end}, its shape needs {expected_bytes}"
        )
    return StoredTensor(name, tuple(shape), dtype, mapping, data_start + begin, end - begin)


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name} is not a whole safetensors file: {what}",
        stage="load",
        remedy="copy the checkpoint again",
    )
