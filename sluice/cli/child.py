"""One service as a child process: started, watched, stopped; never left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_KILL_WAIT_S = 5.0


class Child:
    """``python -m module`` with its output in ``log``. Its own session: Ctrl-C reaches only us."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @classmethod
    async def start(cls, name: str, module: str, env: Mapping[str, str], log: Path) -> Child:
        with log.open("wb") as out:
            process = await _spawn(module, env, out)
        return cls(name, process, log)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; minus the signal number when one ended it."""
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    async def stop(self, grace_s: float) -> bool:
        """SIGTERM, then SIGKILL after ``grace_s``. True when it left by itself."""
        if self._process.returncode is not None:
            return True
        self._process.terminate()
        try:
            await asyncio.wait_for(self._process.wait(), grace_s)
        except TimeoutError:
            self.kill()
            await asyncio.wait_for(self._process.wait(), _KILL_WAIT_S)
            return False
        return True

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    def last_lines(self, count: int) -> list[str]:
        """The end of its log."""
        return self.log.read_text(errors="replace").splitlines()[-count:]


async def _spawn(module: str, env: Mapping[str, str], out: IO[bytes]) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        module,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=out,
        stderr=asyncio.subprocess.STDOUT,
        env=dict(env),
        start_new_session=True,
        preexec_fn=_die_with_parent(),
    )


def _die_with_parent() -> Callable[[], None] | None:
    """Even a parent killed with -9 leaves no children (Linux only)."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    parent = os.getpid()

    def request() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it died before the request was made
            os._exit(1)

    return request


def free_ports(count: int) -> list[int]:
    """Distinct ports that were free a moment ago."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [int(listener.getsockname()[1]) for listener in held]
    finally:
        for listener in held:
            listener.close()
