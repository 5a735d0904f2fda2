"""What a router adds: its latency, its CPU time and its pace over stub workers, beside a gateway written in Rust.

``python -m bench.router`` measures Sluice's router. ``--gateway PYTHON`` names the Python of an environment that has
``sglang-router`` (``pip install sglang-router``; keep it out of Sluice's own), and the same client then drives its
gateway in prefill/decode mode over two HTTP stubs, in the same run. Workers answer at once; a client in C would change
the pace but not who is ahead, so read the CPU column first.

Not the same work: Sluice's router tokenises the prompt, speaks gRPC and turns token ids into text; the gateway sends
the body to two workers and passes the decode worker's bytes on.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import psutil

from tests.e2e.pods import free_port

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "models" / "tiny-dsv4"
BODY = {
    "model": "m",
    "prompt": "And it came to pass in those days",
    "max_tokens": 64,
    "stream": True,
}


@dataclass(frozen=True)
class Subject:
    """A process to measure. ``direct``: where its worker answers over HTTP without it, if it does."""

    name: str
    url: str
    pid: int


@dataclass(frozen=True)
class Measured:
    """Times in milliseconds; CPU of the router's process alone."""

    first_ms: float
    whole_ms: float
    requests_s: float
    cpu_ms: float


async def one(session: aiohttp.ClientSession, url: str) -> tuple[float, float]:
    """Seconds to the first byte of the body and to its end. Raises when it is no good answer."""
    began, first, last = time.perf_counter(), 0.0, b""
    async with session.post(f"{url}/v1/completions", json=BODY) as response:
        response.raise_for_status()
        async for chunk in response.content.iter_any():
            first = first or time.perf_counter() - began
            last = (last + chunk)[-32:]
    assert last.rstrip().endswith(b"[DONE]"), last
    return first, time.perf_counter() - began


async def measure(subject: Subject, requests: int, at_once: int) -> Measured:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        for _ in range(10):
            await one(session, subject.url)
        times: list[tuple[float, float]] = []
        numbers = iter(range(requests))

        async def worker() -> None:
            for _ in numbers:
                times.append(await one(session, subject.url))

        before, began = _cpu_s(subject.pid), time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(at_once)))
        seconds = time.perf_counter() - began
        cpu_s = _cpu_s(subject.pid) - before
    return Measured(
        statistics.median(first for first, _ in times) * 1000,
        statistics.median(whole for _, whole in times) * 1000,
        requests / seconds,
        cpu_s / requests * 1000,
    )


def _cpu_s(pid: int) -> float:
    """Of the process and its children."""
    process = psutil.Process(pid)
    return sum(sum(p.cpu_times()[:2]) for p in [process, *process.children(recursive=True)])


@contextmanager
def child(command: Sequence[str], **environment: str) -> Iterator[int]:
    process = subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    )
    try:
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stub(kind: str, chunks: int, stack: ExitStack) -> tuple[int, int]:
    """Port and pid."""
    port = free_port()
    command = [sys.executable, "-m", "bench.router_stubs", kind, str(port), str(chunks)]
    return port, stack.enter_context(child(command))


def sluice(chunks: int, stack: ExitStack) -> Subject:
    decode, _ = stub("grpc", chunks, stack)
    port = free_port()
    settings = {
        "MODEL_DIR": str(MODEL),
        "MODEL_NAME": "m",
        "DECODES": f"127.0.0.1:{decode}",
        "LISTEN": f"127.0.0.1:{port}",
        "LOG_LEVEL": "warning",
    }
    environment = {f"SLUICE_ROUTER_{name}": value for name, value in settings.items()}
    pid = stack.enter_context(child([sys.executable, "-m", "services.router"], **environment))
    return Subject("sluice router", f"http://127.0.0.1:{port}", pid)


def gateway(python: str, chunks: int, stack: ExitStack) -> list[Subject]:
    """The gateway over two stubs, and one of the stubs by itself."""
    prefill, _ = stub("http", chunks, stack)
    decode, decode_pid = stub("http", chunks, stack)
    port, metrics = free_port(), free_port()
    command = [python, "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--prefill", f"http://127.0.0.1:{prefill}", "none"]
    command += ["--decode", f"http://127.0.0.1:{decode}", "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics)]
    command += ["--worker-startup-check-interval", "1", "--log-level", "warn"]
    pid = stack.enter_context(child(command))
    return [
        Subject("HTTP stub alone", f"http://127.0.0.1:{decode}", decode_pid),
        Subject("sglang-router", f"http://127.0.0.1:{port}", pid),
    ]


async def answering(subject: Subject) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession(trust_env=False) as session:
        while True:
            try:
                await one(session, subject.url)
                return
            except (aiohttp.ClientError, AssertionError):
                await asyncio.sleep(0.2)


async def main(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        subjects = [sluice(args.chunks, stack)]
        if args.gateway:
            subjects += gateway(args.gateway, args.chunks, stack)
        for subject in subjects:
            await answering(subject)
        print(f"{args.chunks} chunks an answer\n")
        print("| | at once | first byte ms | whole answer ms | answers/s | its CPU ms an answer |")
        print("| --- | --- | --- | --- | --- | --- |")
        for at_once, requests in ((1, args.requests), (32, args.requests * 2)):
            for subject in subjects:
                seen = await measure(subject, requests, at_once)
                print(
                    f"| {subject.name} | {at_once} | {seen.first_ms:.2f} | {seen.whole_ms:.2f} "
                    f"| {seen.requests_s:.0f} | {seen.cpu_ms:.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gateway", help="Python of an environment with sglang-router")
    parser.add_argument("--chunks", type=int, default=64)
    parser.add_argument("--requests", type=int, default=200)
    asyncio.run(main(parser.parse_args()))
