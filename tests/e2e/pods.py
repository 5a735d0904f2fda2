"""Real pods for end-to-end tests: processes on free ports that can be killed, stopped, restarted and held."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar
from urllib.request import urlopen

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from sluice.errors import SluiceError
from sluice.rpc.client import DecodeClient, PrefillClient
from sluice.rpc.messages import Finished, GenerateCall, PoolStatus, PromptScored, Tokens
from sluice.transfer.faults import FaultPoint
from sluice.types import AttemptId, Logprobs, PromptLogprobs, RequestId, Sampling

START_TIMEOUT_S = 60.0
T = TypeVar("T")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def eventually(
    look: Callable[[], Awaitable[T]], timeout_s: float, what: str, *, every_s: float = 0.05
) -> T:
    """Look until the result is true; the last result or error is part of the failure."""
    deadline = time.monotonic() + timeout_s
    last: object = None
    while time.monotonic() < deadline:
        try:
            last = await look()
            if last:
                return last
        except SluiceError as error:
            last = error
        await asyncio.sleep(every_s)
    raise AssertionError(f"{what}: not within {timeout_s} s; last seen: {last}")


@dataclass
class Pod:
    """One role as a process. The port stays the same over restarts, the epoch doesn't."""

    role: str
    settings: Mapping[str, str]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        prefix = f"SLUICE_{self.role.upper()}_"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
        environment |= {prefix + name.upper(): value for name, value in self.settings.items()}
        environment |= {prefix + "LISTEN": self.address, "OMP_NUM_THREADS": "1", **self.environment}
        with self.log_file.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", f"services.{self.role}"],
                env=environment,
                stdout=log,
                stderr=log,
            )

    def kill(self) -> None:
        """SIGKILL: no goodbye."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(timeout=10)

    def stop(self) -> int:
        """SIGTERM, as Kubernetes does it. Returns the exit code."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=30)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def health(self, service: str = "") -> bool:
        """What a probe hears: whether this service is SERVING."""
        with grpc.insecure_channel(self.address) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def log_lines(self) -> list[dict[str, object]]:
        lines = self.log_file.read_text().splitlines()
        whole = (line for line in lines if line.startswith("{") and line.endswith("}"))
        return [json.loads(line) for line in whole]

    def scrape(self) -> dict[str, float]:
        """``name{label values}`` to value, over the port that the log names; of this life or the last."""
        found = [line for line in self.log_lines() if line["event"] == "metrics_listening"]
        with urlopen(f"http://{found[-1]['address']}/metrics", timeout=5) as answer:
            families = text_string_to_metric_families(answer.read().decode())
        return {
            f"{sample.name}{{{','.join(sample.labels.values())}}}": sample.value
            for family in families
            for sample in family.samples
        }

    def log_tail(self, lines: int = 30) -> str:
        text = self.log_file.read_text(errors="replace")
        return "\n".join(text.splitlines()[-lines:])


@dataclass
class Pair:
    """1P1D. ``faults`` is the directory that steers the pods' fault points."""

    prefill: Pod
    decode: Pod
    faults: Path

    @classmethod
    def create(
        cls,
        folder: Path,
        model_dir: Path,
        environment: Mapping[str, str] | None = None,
        **settings: str,
    ) -> Pair:
        """``settings`` go to both pods, except names that start with ``prefill_`` or ``decode_``."""
        env = environment or {}
        faults = folder / "faults"
        faults.mkdir(parents=True)
        shared = {"model_dir": str(model_dir), "fault_dir": str(faults)}
        # Canaries are attempts too: a second one would come to a held fault point before the test's request does.
        own: dict[str, dict[str, str]] = {"prefill": {}, "decode": {"canary_every_s": "600"}}
        for name, value in settings.items():
            role, _, rest = name.partition("_")
            (own[role] if role in own else shared).update({rest if role in own else name: value})
        prefill = Pod("prefill", shared | own["prefill"], folder / "prefill.log", env)
        decode_settings = shared | own["decode"] | {"peers": prefill.address}
        return cls(prefill, Pod("decode", decode_settings, folder / "decode.log", env), faults)

    def start(self) -> None:
        self.prefill.start()
        self.decode.start()

    def kill(self) -> None:
        for pod in (self.prefill, self.decode):
            if pod.alive():
                pod.thaw()
                pod.kill()

    # -- steering -------------------------------------------------------------------------------------------

    def hold(self, point: FaultPoint) -> None:
        (self.faults / f"at.{point.value}").unlink(missing_ok=True)
        (self.faults / f"hold.{point.value}").touch()

    def let_go(self, point: FaultPoint) -> None:
        (self.faults / f"hold.{point.value}").unlink(missing_ok=True)

    def let_all_go(self) -> None:
        for point in FaultPoint:
            self.let_go(point)

    async def reached(self, point: FaultPoint, timeout_s: float = 15.0) -> None:
        async def look() -> bool:
            return (self.faults / f"at.{point.value}").exists()

        await eventually(look, timeout_s, f"{point.value} reached", every_s=0.01)

    # -- looking --------------------------------------------------------------------------------------------

    async def ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Decode is ready, and what it is paired with is the prefill process that answers now."""
        async with (
            DecodeClient(self.decode.address) as client,
            PrefillClient(self.prefill.address) as prefill,
        ):

            async def look() -> bool:
                for pod in (self.prefill, self.decode):
                    assert pod.alive(), f"{pod.role} exited:\n{pod.log_tail()}"
                status = await client.get_status(2.0)
                if not status.ready:
                    raise SluiceError(status.reason)
                epoch = (await prefill.get_status(2.0)).epoch
                return all(peer.epoch == epoch for peer in status.peers)

            await eventually(look, timeout_s, "pair ready")

    async def baseline(self, timeout_s: float = 15.0) -> None:
        """Both pods' pools are exactly as if no request had ever been there."""
        await self.decode_baseline(timeout_s)
        await self.prefill_baseline(timeout_s)

    async def decode_baseline(self, timeout_s: float = 15.0) -> None:
        async with DecodeClient(self.decode.address) as client:

            async def look() -> bool:
                return _untouched((await client.get_status(2.0)).pools)

            await eventually(look, timeout_s, "decode pools at baseline")

    async def prefill_baseline(self, timeout_s: float = 15.0) -> None:
        async with PrefillClient(self.prefill.address) as client:

            async def look() -> bool:
                status = await client.get_status(2.0)
                return status.attempts == 0 and _untouched(status.pools)

            await eventually(look, timeout_s, "prefill pools at baseline")

    async def quarantined(self) -> int:
        async with DecodeClient(self.decode.address) as client:
            status = await client.get_status(2.0)
            return sum(peer.quarantined_attempts for peer in status.peers)


def _untouched(pools: tuple[PoolStatus, ...]) -> bool:
    assert pools, "no pool was reported"
    assert all(p.free + p.held + p.quarantined + p.cached == p.total for p in pools)
    return all(pool.free + pool.cached == pool.total for pool in pools)


@dataclass
class Answer:
    """What one Generate call streamed."""

    token_ids: list[int] = field(default_factory=list)
    accepted: list[int | None] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None
    finished: Finished | None = None


async def generate(
    pair: Pair,
    prompt: tuple[int, ...],
    sampling: Sampling | None = None,
    *,
    timeout_s: float = 30.0,
    on_tokens: Callable[[Answer], None] | None = None,
) -> Answer:
    """One request straight to the decode pod; raises the typed error of a failure."""
    answer = Answer()
    name = f"test-{os.urandom(8).hex()}"
    call = GenerateCall(
        RequestId(name),
        AttemptId(name),
        pair.prefill.address,
        prompt,
        sampling or Sampling(max_tokens=16, ignore_eos=True),
        timeout_s,
    )
    async with DecodeClient(pair.decode.address) as client:
        async for message in client.generate(call):
            if isinstance(message, Tokens):
                answer.token_ids += message.token_ids
                answer.accepted.append(message.accepted_drafts)
                answer.logprobs += message.logprobs
                if on_tokens is not None:
                    on_tokens(answer)
            elif isinstance(message, PromptScored):
                assert not answer.token_ids
                answer.prompt_logprobs = message.positions
            else:
                answer.finished = message
    return answer
