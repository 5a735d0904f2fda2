"""A reloaded value: new content is taken, bad content is not, and the log says it once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import structlog

from sluice.errors import ConfigError
from sluice.reload import Reloaded


def _write(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text)
    os.replace(new, file)


def _number(file: Path) -> Reloaded[int]:
    def read() -> int:
        try:
            return int(file.read_text())
        except ValueError as error:
            raise ConfigError(str(error)) from error

    return Reloaded("number", [file], read)


def test_a_changed_file_is_read_again_and_an_unchanged_one_is_not(tmp_path: Path) -> None:
    file = tmp_path / "f"
    file.write_text("1")
    reads = 0

    def read() -> object:
        nonlocal reads
        reads += 1
        return object()

    value = Reloaded("thing", [file], read)
    first = value.get()
    assert value.get() is first
    _write(file, "2")
    assert value.get() is not first
    assert reads == 2


@pytest.mark.parametrize("bad", ["x", None])
def test_bad_content_keeps_the_last_good_value_and_is_logged_once(
    tmp_path: Path, bad: str | None
) -> None:
    file = tmp_path / "f"
    file.write_text("1")
    value = _number(file)
    if bad is None:
        file.unlink()
    else:
        _write(file, bad)
    with structlog.testing.capture_logs() as logs:
        assert [value.get() for _ in range(3)] == [1, 1, 1]
    assert [(log["event"], log["log_level"]) for log in logs] == [("reload_failed", "error")]
    _write(file, "2")
    assert value.get() == 2


def test_a_secret_mounted_by_kubernetes_is_seen_to_change(tmp_path: Path) -> None:
    """Kubelet never touches a mounted file: it turns the link to the folder that holds them all."""
    for number in ("1", "2"):
        (tmp_path / f"v{number}").mkdir()
        (tmp_path / f"v{number}" / "f").write_text(number)
    (tmp_path / "data").symlink_to("v1")
    (tmp_path / "f").symlink_to("data/f")
    value = _number(tmp_path / "f")
    assert value.get() == 1
    (tmp_path / "new").symlink_to("v2")
    os.replace(tmp_path / "new", tmp_path / "data")
    assert value.get() == 2


def test_bad_content_at_first_is_refused(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    with pytest.raises(ConfigError):
        _number(tmp_path / "f")


def test_content_that_changes_while_it_is_read_is_not_taken(tmp_path: Path) -> None:
    """Certificate and key read from two sides of a rotation would not fit each other."""
    file = tmp_path / "f"
    file.write_text("old")
    rewrite = False

    def read() -> str:
        nonlocal rewrite
        text = file.read_text()
        if rewrite:
            rewrite = False
            _write(file, "newest")
        return text

    value = Reloaded("text", [file], read)
    rewrite = True
    _write(file, "new")
    assert value.get() == "old"
    assert value.get() == "newest"
