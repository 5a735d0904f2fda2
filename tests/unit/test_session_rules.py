"""The session rules of tests/conftest.py, each broken on purpose in a pytest run of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

_CONFTEST = Path(__file__).parents[1] / "conftest.py"
_INI = """
[pytest]
addopts = -p no:cacheprovider -p no:randomly
markers =
    optional(reason): may be skipped in CI
"""


def _run(folder: Path, source: str, ci: str = "") -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(_CONFTEST.read_text())
    (folder / "pytest.ini").write_text(_INI)
    (folder / "test_it.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", str(folder)]
    environment = {**os.environ, "CI": ci}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env=environment, check=False
    )


_SKIPS = """
import pytest
def test_skipped():
    pytest.skip("no device")
@pytest.mark.optional(reason="needs a device")
def test_optional():
    pytest.skip("no device")
"""


def test_unmarked_skip_fails_in_ci_only(tmp_path: Path) -> None:
    here = _run(tmp_path, _SKIPS)
    assert here.returncode == 0, here.stdout
    assert "2 skipped" in here.stdout

    ci = _run(tmp_path, _SKIPS, ci="true")
    assert ci.returncode == 1, ci.stdout
    assert "1 failed, 1 skipped" in ci.stdout
    assert "skipped in CI without an optional marker: Skipped: no device" in ci.stdout


def test_skip_of_a_whole_module_fails_in_ci(tmp_path: Path) -> None:
    result = _run(tmp_path, "import pytest\npytest.importorskip('no_such_module')\n", ci="true")
    assert result.returncode != 0, result.stdout
    assert "1 error" in result.stdout


def test_optional_marker_needs_a_reason(tmp_path: Path) -> None:
    source = "import pytest\n@pytest.mark.optional\ndef test_x(): pass\n"
    result = _run(tmp_path, source)
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "needs a reason" in result.stdout + result.stderr


_ORPHAN = """
import subprocess, sys
def test_leaves_an_orphan():
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    code = f"import subprocess; print(subprocess.Popen({sleeper!r}).pid)"
    pipe = subprocess.PIPE
    parent = subprocess.run([sys.executable, "-c", code], stdout=pipe, check=True, timeout=20)
    print("ORPHAN", parent.stdout.decode())
"""


@pytest.mark.slow
def test_orphaned_process_fails_the_session_and_is_killed(tmp_path: Path) -> None:
    source = _ORPHAN.replace("subprocess.Popen(", "subprocess.Popen(stdout=-3, args=")
    result = _run(tmp_path, source)
    assert result.returncode == 1, result.stdout
    assert "1 passed" in result.stdout
    assert "processes left behind" in result.stdout
    left = [line for line in result.stdout.splitlines() if "time.sleep(60)" in line]
    assert len(left) == 1
    assert not _alive(int(left[0].split(":")[0]))


def _alive(pid: int) -> bool:
    """A killed orphan stays a zombie until init reaps it, which some container inits never do."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
