"""Stub generation: complete, quiet where nothing changed, and free of stale files."""

from __future__ import annotations

from pathlib import Path

import pytest

import hatch_build

_PROTO = 'syntax = "proto3"; package sluice.v1; message Ping { int32 number = 1; } '
_SERVICE = "service Echo { rpc Send(Ping) returns (stream Ping); } "


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "proto" / "sluice" / "v1"
    folder.mkdir(parents=True)
    (folder / "echo.proto").write_text(_PROTO + _SERVICE)
    return tmp_path


def test_every_proto_gets_messages_services_and_types(root: Path) -> None:
    names = [path.name for path in hatch_build.generate(root)]
    assert names == ["echo_pb2.py", "echo_pb2.pyi", "echo_pb2_grpc.py", "echo_pb2_grpc.pyi"]
    stub = (root / "sluice" / "v1" / "echo_pb2_grpc.py").read_text()
    assert "from sluice.v1 import echo_pb2" in stub


def test_unchanged_stubs_are_not_rewritten(root: Path) -> None:
    before = [path.stat().st_ino for path in hatch_build.generate(root)]
    assert [path.stat().st_ino for path in hatch_build.generate(root)] == before


def test_stub_of_a_removed_proto_is_removed(root: Path) -> None:
    hatch_build.generate(root)
    keep = root / "sluice" / "v1" / "__init__.py"
    keep.write_text("")
    (root / "proto" / "sluice" / "v1" / "echo.proto").unlink()
    assert hatch_build.generate(root) == []
    assert list((root / "sluice" / "v1").iterdir()) == [keep]


def test_broken_proto_is_named(root: Path) -> None:
    (root / "proto" / "sluice" / "v1" / "bad.proto").write_text("message {")
    with pytest.raises(RuntimeError, match=r"bad\.proto"):
        hatch_build.generate(root)
    assert list((root / "sluice" / "v1").iterdir()) == []
