"""A checkpoint's manifest: cheap proof, from headers and sizes, that a folder is whole and the one that was meant.

The weights' own digest (`ModelInfo.weights_digest`) reads every byte and is what two pods compare. This one reads
kilobytes: it finds the wrong checkpoint, a missing shard and a download that stopped half way, not a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

from sluice.errors import CheckpointError

_MAX_HEADER_BYTES = 100 << 20  # safetensors' own bound


def manifest_digest(folder: Path) -> str:
    """Hex digest of config.json, tokenizer.json and every safetensors file's name, size and header.

    Raises `CheckpointError` for a folder that can't be loaded: unreadable, without weights, a shard cut off.
    """
    total = hashlib.blake2b(digest_size=16)
    try:
        total.update((folder / "config.json").read_bytes())
        tokenizer = folder / "tokenizer.json"
        total.update(tokenizer.read_bytes() if tokenizer.exists() else b"")
        shards = sorted(folder.glob("*.safetensors"))
        if not shards:
            raise _broken(f"{folder} has no *.safetensors")
        for shard in shards:
            total.update(f"{shard.name}|{shard.stat().st_size}|".encode())
            total.update(_header(shard))
    except OSError as error:
        raise _broken(f"can't read {error.filename}: {error.strerror}") from error
    return total.hexdigest()


def _header(shard: Path) -> bytes:
    """The JSON header, once the file is as long as it says."""
    with shard.open("rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (0,)
        header = file.read(length) if 0 < length <= _MAX_HEADER_BYTES else b""
    try:
        tensors = json.loads(header)
        ends = [entry["data_offsets"][1] for name, entry in tensors.items() if name[0] != "_"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _broken(f"{shard.name} has no safetensors header") from error
    wanted, found = 8 + length + max(ends, default=0), shard.stat().st_size
    if found < wanted:
        raise _broken(f"{shard.name} has {found} bytes of {wanted}")
    return header


def _broken(message: str) -> CheckpointError:
    return CheckpointError(message, stage="load", remedy="fetch the checkpoint again")
