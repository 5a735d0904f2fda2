"""All tests, in two sessions side by side: those that start pods wait much of their time, the others fill it.

With arguments it is pytest and nothing else. The exit code is 0 only when both sessions' are.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

POD_TESTS = ("tests/e2e", "tests/cluster")


def pytest_command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *arguments]


def main(arguments: list[str]) -> int:
    if arguments:
        return subprocess.call(pytest_command(*arguments))
    with tempfile.TemporaryDirectory(prefix="sluice-tests-") as folder:
        log = Path(folder) / "others.log"
        with log.open("wb") as out:
            ignored = [f"--ignore={folder}" for folder in POD_TESTS]
            others = subprocess.Popen(pytest_command(*ignored), stdout=out, stderr=out)
        try:
            pods = subprocess.call(pytest_command(*POD_TESTS))
            code = others.wait()
        finally:
            others.kill()  # after Ctrl-C; else it has ended
            others.wait()
        print(log.read_text(errors="replace"), flush=True)
    return pods or code


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
