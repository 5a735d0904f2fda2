"""All tests, in two sessions of about equal length: those that start pods wait much of their time, the others fill it.

With arguments it is pytest and nothing else. The exit code is 0 only when both sessions' are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

POD_TESTS = ("tests/e2e", "tests/cluster")
# Starts pods too, of many ranks, which compute more than they wait.
BUSY_POD_TESTS = "tests/e2e/test_parallel_pods.py"


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def other_tests() -> list[str]:
    """Every other folder with tests."""
    folders = (folder for folder in Path("tests").iterdir() if any(folder.rglob("test_*.py")))
    return sorted({str(folder) for folder in folders} - {*POD_TESTS})


def main(arguments: list[str]) -> int:
    if arguments:
        return subprocess.call(pytest_command(*arguments))
    with tempfile.TemporaryDirectory(prefix="sluice-tests-") as folder:
        log = Path(folder) / "others.log"
        with log.open("wb") as out:
            command = pytest_command(*other_tests(), BUSY_POD_TESTS)
            others = subprocess.Popen(command, stdout=out, stderr=out)
        try:
            pods = subprocess.call(pytest_command(*POD_TESTS, f"--ignore={BUSY_POD_TESTS}"))
            code = others.wait()
        finally:
            others.kill()  # after Ctrl-C; else it has ended
            others.wait()
        print(log.read_text(errors="replace"), flush=True)
    return pods or code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
