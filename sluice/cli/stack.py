"""Prefill, decode and router as three processes of this machine, for `sluice up` and `sluice ab`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from sluice.cli.child import Child, free_ports
from sluice.config import PoolMode
from sluice.errors import ConfigError, InternalError, SluiceError
from sluice.rpc.client import DecodeClient, PodClient, PrefillClient

_POLL_S = 0.2
_STOP_GRACE_S = 8.0  # a pod drains for 5 s
_LOG_LINES = 20
Report = Callable[[str, str], None]  # (role, what it is doing)


@dataclass(frozen=True)
class StackConfig:
    """``port`` 0 takes a free one. Children also see this process's environment."""

    model_dir: Path
    mode: PoolMode
    spec_steps: int | None
    logs: Path
    host: str = "127.0.0.1"
    port: int = 0
    ready_timeout_s: float = 120.0
    num_pages: int = 256  # state memory of each pod; one page of a 135M model is 6 MB


class ChildDied(InternalError):
    """A service ended by itself; the message has the end of its log."""


class Stack:
    """The three processes. Use `run_stack`."""

    def __init__(self, config: StackConfig) -> None:
        self._config = config
        prefill, decode, router = free_ports(3)
        self.prefill_address = f"127.0.0.1:{prefill}"
        self.decode_address = f"127.0.0.1:{decode}"
        self._router_address = f"{config.host}:{config.port or router}"
        self.children: list[Child] = []  # in the order of starting

    @property
    def url(self) -> str:
        return f"http://{self._router_address}"

    async def start(self) -> None:
        """Start all three at once; they find each other."""
        for role, settings in self._settings().items():
            prefix = f"SLUICE_{role.upper()}_"
            env = {"OMP_NUM_THREADS": "1", **os.environ}
            env |= {prefix + name: value for name, value in settings.items()}
            log = self._config.logs / f"{role}.log"
            child = await Child.start(role, f"services.{role}", env, log)
            self.children.append(child)

    async def wait_ready(self, report: Report) -> None:
        """Until a request can be served. Raises `ChildDied`, or `ConfigError` when time is up."""
        dead = asyncio.create_task(self.wait_dead())
        ready = asyncio.create_task(self._ready(report))
        try:
            done, _ = await asyncio.wait(
                (dead, ready),
                timeout=self._config.ready_timeout_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            dead.cancel()
            ready.cancel()
            await asyncio.gather(dead, ready, return_exceptions=True)
        if dead in done:
            raise dead.result()
        if not done:
            raise ConfigError(
                f"not ready within {self._config.ready_timeout_s:.0f} s",
                stage="start",
                remedy=f"see the logs in {self._config.logs}",
            )
        ready.result()

    async def wait_dead(self) -> ChildDied:
        """Until one of the three ends; what to tell about it."""
        waits = {asyncio.create_task(child.wait()): child for child in self.children}
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        child = waits[done.pop()]
        lines = "\n".join(f"  {line}" for line in child.last_lines(_LOG_LINES))
        return ChildDied(f"{child.name} {_how(child.exit_code)}; the end of {child.log}:\n{lines}")

    async def stop(self, report: Report) -> None:
        """Router first, so that nothing new comes in; then decode, which owns requests; prefill last."""
        for child in reversed(self.children):
            report(child.name, "stopping")
            clean = await child.stop(_STOP_GRACE_S)
            report(child.name, "stopped" if clean else "killed after it ignored SIGTERM")

    def kill(self) -> None:
        for child in self.children:
            child.kill()

    def _settings(self) -> dict[str, dict[str, str]]:
        config = self._config
        pod = {
            "MODEL_DIR": str(config.model_dir),
            "POOL_MODE": config.mode.value,
            "NUM_PAGES": str(config.num_pages),
        }
        if config.spec_steps is not None:
            pod["SPEC_STEPS"] = str(config.spec_steps)
        return {
            "prefill": pod | {"LISTEN": self.prefill_address},
            "decode": pod | {"LISTEN": self.decode_address, "PEERS": self.prefill_address},
            "router": {
                "MODEL_DIR": str(config.model_dir),
                "LISTEN": self._router_address,
                "DECODES": self.decode_address,
                "PREFILLS": self.prefill_address,
            },
        }

    async def _ready(self, report: Report) -> None:
        async with (
            PrefillClient(self.prefill_address) as prefill,
            DecodeClient(self.decode_address) as decode,
            httpx.AsyncClient(base_url=self.url, trust_env=False, timeout=2.0) as http,
        ):
            await asyncio.gather(
                _until_serving("prefill", prefill, "sluice.v1.Prefill", "ready", report),
                _until_agreed(decode, report),
                _until_routed(http, report),
            )


@asynccontextmanager
async def run_stack(stack: Stack, report: Report) -> AsyncIterator[None]:
    """Started here, and stopped in order on the way out, whatever happens inside."""
    try:
        await stack.start()
        yield
    finally:
        await stack.stop(report)


async def _until_serving(
    role: str, client: PodClient, service: str, done: str, report: Report
) -> None:
    while not await _serves(client, service):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
    report(role, done)


async def _until_agreed(decode: DecodeClient, report: Report) -> None:
    await _until_serving("decode", decode, "", "listening", report)
    await _until_serving("decode", decode, "sluice.layout", "agreed with prefill", report)
    await _until_serving("decode", decode, "sluice.v1.Decode", "ready", report)


async def _until_routed(http: httpx.AsyncClient, report: Report) -> None:
    listening = False
    while True:
        try:
            response = await http.get("/ready")
            if response.status_code == 200:
                report("router", "ready")
                return
            if not listening:
                listening = True
                report("router", "listening")
        except httpx.TransportError:
            pass
        await asyncio.sleep(_POLL_S)


async def _serves(client: PodClient, service: str) -> bool:
    try:
        return await client.healthy(service)
    except SluiceError:
        return False


def _how(exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"was ended by signal {-exit_code}"
    return f"exited with code {exit_code}"
