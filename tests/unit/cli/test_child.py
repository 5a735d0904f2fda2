"""Child processes: output kept, stopped politely and then not, gone with their parent."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from sluice.cli.child import Child, free_ports


async def _start(tmp_path: Path, code: str) -> Child:
    """A child that runs ``code``, having written "up" to its log when it gets there."""
    (tmp_path / "scripted_child.py").write_text(code)
    env: Mapping[str, str] = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return await Child.start("scripted", "scripted_child", env, tmp_path / "child.log")


async def _until_up(child: Child) -> None:
    async with asyncio.timeout(10):
        while "up" not in child.last_lines(5):  # noqa: ASYNC110
            await asyncio.sleep(0.02)


@pytest.mark.asyncio
async def test_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    code = "import sys\nprint('one')\nprint('two', file=sys.stderr)\nsys.exit(7)"
    child = await _start(tmp_path, code)
    assert await asyncio.wait_for(child.wait(), 10) == 7
    assert child.exit_code == 7
    assert sorted(child.last_lines(5)) == ["one", "two"]
    assert len(child.last_lines(1)) == 1
    assert await child.stop(1.0)


@pytest.mark.asyncio
async def test_a_polite_child_is_asked(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    child = await _start(tmp_path, code)
    await _until_up(child)
    assert await child.stop(5.0)
    assert child.exit_code == 0


@pytest.mark.asyncio
async def test_a_deaf_child_is_killed(tmp_path: Path) -> None:
    code = (
        "import signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "print('up', flush=True)\ntime.sleep(60)"
    )
    child = await _start(tmp_path, code)
    await _until_up(child)
    started = time.monotonic()
    assert not await child.stop(0.2)
    assert time.monotonic() - started < 3.0
    assert child.exit_code == -signal.SIGKILL


@pytest.mark.asyncio
async def test_ctrl_c_does_not_reach_children(tmp_path: Path) -> None:
    child = await _start(tmp_path, "print('up', flush=True)\nimport time; time.sleep(60)")
    await _until_up(child)
    assert os.getsid(child.pid) != os.getsid(0)
    await child.stop(5.0)


_PARENT = """
import asyncio, os, sys
from pathlib import Path
from sluice.cli.child import Child

async def main():
    child = await Child.start("c", "scripted_child", os.environ, Path(sys.argv[1]))
    print(child.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.optional(reason="only Linux tells children of their parent's death")
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_a_parent_killed_at_once_leaves_no_children(tmp_path: Path) -> None:
    (tmp_path / "scripted_child.py").write_text("import time; time.sleep(60)")
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, str(tmp_path / "child.log")],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), os.getcwd()))},
    )
    try:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
    finally:
        parent.kill()
        parent.communicate()
    gone, alive = psutil.wait_procs([child], timeout=5)
    assert alive == [] or child.status() == psutil.STATUS_ZOMBIE
    assert gone or child.status() == psutil.STATUS_ZOMBIE


def test_free_ports_differ() -> None:
    ports = free_ports(5)
    assert len(set(ports)) == 5
