"""Finding a model folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.cli.places import log_folder, model_folder
from sluice.errors import ConfigError


def _checkpoint(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def test_a_path_wins(tmp_path: Path) -> None:
    folder = _checkpoint(tmp_path / "somewhere")
    assert model_folder(str(folder)) == folder.resolve()


def test_a_name_is_looked_up_under_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = _checkpoint(tmp_path / "models" / "mine")
    monkeypatch.chdir(tmp_path)
    assert model_folder("mine") == folder.resolve()


def test_a_missing_model_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"no model 'none'.*models/none"):
        model_folder("none")


def test_log_folder_is_made(tmp_path: Path) -> None:
    assert log_folder(str(tmp_path / "a" / "b")).is_dir()
    fresh = log_folder(None)
    assert fresh.is_dir()
    fresh.rmdir()
