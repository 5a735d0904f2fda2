"""Generates the protobuf and gRPC stubs in sluice/v1/ from proto/: build hook and `make proto`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROTO_DIR = "proto"
STUB_DIR = "sluice/v1"
STUB_SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi")


def generate(root: Path) -> list[Path]:
    """Write stubs of every `proto/sluice/v1/*.proto` under `root`; returns them, sorted.

    Stubs are made in a scratch folder and moved over one by one, and only where they differ, so
    that a process importing them at the same time never sees a half-written file. Stubs whose
    proto is gone are removed. Raises RuntimeError if protoc refuses a file.
    """
    protos = sorted((root / PROTO_DIR / STUB_DIR).glob("*.proto"))
    target = root / STUB_DIR
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target, prefix=".stubs-") as scratch:
        if protos:
            _run_protoc(root / PROTO_DIR, protos, Path(scratch))
        made = sorted(p for p in (Path(scratch) / STUB_DIR).glob("*") if _is_stub(p))
        for stub in made:
            _replace_if_changed(stub, target / stub.name)
    names = {stub.name for stub in made}
    for stale in target.iterdir():
        if _is_stub(stale) and stale.name not in names:
            stale.unlink()
    return [target / name for name in sorted(names)]


def _is_stub(path: Path) -> bool:
    return path.name.endswith(STUB_SUFFIXES)


def _replace_if_changed(new: Path, old: Path) -> None:
    if not old.exists() or old.read_bytes() != new.read_bytes():
        os.replace(new, old)


def _run_protoc(include: Path, protos: list[Path], out: Path) -> None:
    # A process of its own: protoc's compiled core crashes one that has other protobuf users loaded.
    # `-m grpc_tools.protoc` adds the include path of the well-known types itself.
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={include}",
        f"--plugin=protoc-gen-mypy={_plugin('protoc-gen-mypy')}",
        f"--plugin=protoc-gen-mypy_grpc={_plugin('protoc-gen-mypy_grpc')}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        f"--mypy_grpc_out=quiet:{out}",
    ]
    done = subprocess.run(
        [*command, *map(str, protos)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        names = ", ".join(proto.name for proto in protos)
        raise RuntimeError(
            f"protoc failed with status {done.returncode} on {names}:\n{done.stderr}"
        )


def _plugin(name: str) -> str:
    """Path of a protoc plugin: from PATH (an isolated build), else beside this interpreter."""
    path = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if path is None:
        raise RuntimeError(f"{name} not found; install mypy-protobuf (it is in the dev extra)")
    return path


try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run as a script where hatchling is not installed
    pass
else:

    class StubBuildHook(BuildHookInterface[Any]):
        """Runs `generate` before a wheel or an editable install is put together."""

        def initialize(self, version: str, build_data: dict[str, Any]) -> None:
            generate(Path(self.root))


if __name__ == "__main__":
    for written in generate(Path(__file__).resolve().parent):
        print(written.relative_to(Path(__file__).resolve().parent))
