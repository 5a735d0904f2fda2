"""A container image in `docker save`'s format, written from tar files: what containerd and podman import."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def write_image(
    out: Path, name: str, layers: Sequence[Path], config: Mapping[str, object] | None = None
) -> None:
    """``name`` with its tag. ``config`` as in an image's configuration: Env, Cmd, User."""
    digests = [_sha256(layer) for layer in layers]
    description = {
        "architecture": "amd64",
        "os": "linux",
        "config": dict(config or {}),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": layer.name} for layer in layers],
    }
    image = json.dumps(description).encode()
    config_name = f"{hashlib.sha256(image).hexdigest()}.json"
    paths = [f"{digest}/layer.tar" for digest in digests]
    manifest = json.dumps([{"Config": config_name, "RepoTags": [name], "Layers": paths}]).encode()
    with tarfile.open(out, "w") as tar:
        for layer, path in zip(layers, paths, strict=True):
            tar.add(layer, arcname=path)
        for path, content in ((config_name, image), ("manifest.json", manifest)):
            entry = tarfile.TarInfo(path)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
