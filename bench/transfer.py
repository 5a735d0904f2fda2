"""What moving state costs: copies, sockets, gRPC and NIXL side by side, then a whole DeepSeek-V4 request.

``python -m bench.transfer`` (``make bench-transfer``) prints two tables and writes them to ``bench/results/``.
All ways move the same pages in the same run, in interleaved rounds, so that a busy moment hits all of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import torch
from numpy.typing import NDArray

from bench.transfer_peer import METHOD
from bench.transfer_report import Rate, RequestRow, component_table, rate_table, request_table
from bench.transfer_state import (
    digests,
    flash_config,
    open_request,
    scramble,
    size_of,
    spans,
)
from sluice.layout.span import Run
from sluice.pools.base import Region
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Link, Write
from sluice.transfer.worker import TransferWorker
from sluice.transfer.writes import plan_writes
from tests.contract.target_process import endpoint_from_json

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGE_SIZES = (4 << 10, 32 << 10, 256 << 10, 2 << 20)
# gRPC: 4 KB messages are a hundred times slower, nobody would send them.
SMALLEST_MESSAGE = 256 << 10
LARGEST_MESSAGE = 1 << 20
WAIT_S = 120.0


class Peer:
    """A receiving process and the JSON line it greeted with."""

    def __init__(self, module: str, *arguments: str, tls: str = "") -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        if tls:
            environment["UCX_TLS"] = tls
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.greeting = self.read_line()
        self._meter = psutil.Process(self._process.pid)

    def read_line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.read_line()

    def cpu_s(self) -> float:
        times = self._meter.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=WAIT_S)


@dataclass(frozen=True)
class Pages:
    """The source arena and the order in which its pages are sent."""

    arena: torch.Tensor
    page_bytes: int
    order: NDArray[np.int64]

    def view(self, page: int) -> memoryview:
        at = page * self.page_bytes
        return self.arena[at : at + self.page_bytes].numpy().data


Way = Callable[[Pages], None]


def memcpy_way(target: torch.Tensor) -> Way:
    def copy(pages: Pages) -> None:
        rows = pages.arena.view(-1, pages.page_bytes)
        out = target.view(-1, pages.page_bytes)
        torch.index_select(rows, 0, torch.from_numpy(pages.order), out=out)

    return copy


def tcp_way(peer: Peer) -> Way:
    connection = socket.create_connection(("127.0.0.1", json.loads(peer.greeting)["port"]))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def push(pages: Pages) -> None:
        for page in pages.order.tolist():
            connection.sendall(pages.view(page))
        assert connection.recv(1) == b"k"

    return push


def grpc_way(peer: Peer) -> Way:
    channel = grpc.insecure_channel(f"127.0.0.1:{json.loads(peer.greeting)['port']}")
    call: Any = channel.stream_unary(METHOD)

    def messages(pages: Pages) -> Iterator[bytes]:
        size = min(max(pages.page_bytes, SMALLEST_MESSAGE), LARGEST_MESSAGE)
        order = pages.order.tolist()
        if pages.page_bytes > size:
            for page in order:
                view = pages.view(page)
                yield from (bytes(view[at : at + size]) for at in range(0, len(view), size))
            return
        per_message = size // pages.page_bytes
        for at in range(0, len(order), per_message):
            yield b"".join(pages.view(page) for page in order[at : at + per_message])

    def push(pages: Pages) -> None:
        arrived = int.from_bytes(call(messages(pages), timeout=WAIT_S), "little")
        assert arrived == pages.arena.numel()

    return push


def nixl_way(worker: TransferWorker, peer: Peer) -> Way:
    endpoint = endpoint_from_json(peer.greeting)
    link = worker.connect(endpoint).result(WAIT_S)
    base = endpoint.regions[0].address

    def push(pages: Pages) -> None:
        source, size = pages.arena.data_ptr(), pages.page_bytes
        writes = [
            Write(source + page * size, base + at * size, size)
            for at, page in enumerate(pages.order.tolist())
        ]
        worker.submit(link, writes, None, WAIT_S).future.result(WAIT_S)

    return push


def measure(way: Way, pages: Pages, receiver: Peer | None) -> tuple[float, float, float]:
    """(seconds, CPU seconds here, CPU seconds there) of one push."""
    there = receiver.cpu_s() if receiver else 0.0
    here, started = time.process_time(), time.perf_counter()
    way(pages)
    seconds, used = time.perf_counter() - started, time.process_time() - here
    return seconds, used, (receiver.cpu_s() if receiver else 0.0) - there


def compare_ways(num_bytes: int, rounds: int) -> list[Rate]:
    arena = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    target = torch.zeros(num_bytes, dtype=torch.uint8)
    region = Region("bench", 0, arena.data_ptr(), num_bytes // 4096, 4096)
    nixl_target = "tests.contract.target_process"
    with contextlib.ExitStack() as stack:
        peers = {
            "tcp socket": Peer("bench.transfer_peer", "tcp", str(num_bytes)),
            "gRPC stream": Peer("bench.transfer_peer", "grpc", str(num_bytes)),
            "NIXL default": Peer(nixl_target, "bench-default", str(num_bytes)),
            "NIXL tcp": Peer(nixl_target, "bench-tcp", str(num_bytes), tls="tcp"),
        }
        for peer in peers.values():
            stack.callback(peer.close)
        worker = TransferWorker(NixlPlane(f"bench-{uuid.uuid4().hex[:8]}", initiator=True))
        worker.start(arena, [region])
        stack.callback(worker.close)
        ways: dict[str, Way] = {
            "memcpy": memcpy_way(target),
            "tcp socket": tcp_way(peers["tcp socket"]),
            "gRPC stream": grpc_way(peers["gRPC stream"]),
            "NIXL default": nixl_way(worker, peers["NIXL default"]),
            "NIXL tcp": nixl_way(worker, peers["NIXL tcp"]),
        }
        return _run_rounds(arena, ways, peers, rounds)


def _run_rounds(
    arena: torch.Tensor, ways: dict[str, Way], peers: dict[str, Peer], rounds: int
) -> list[Rate]:
    dice = np.random.default_rng(1)
    taken: dict[tuple[str, int], list[tuple[float, float, float]]] = {}
    for number in range(rounds + 1):
        for size in PAGE_SIZES:
            pages = Pages(arena, size, dice.permutation(arena.numel() // size))
            for name, way in ways.items():
                result = measure(way, pages, peers.get(name))
                if number:  # the first round connects and faults pages in
                    taken.setdefault((name, size), []).append(result)
    gigabytes = arena.numel() / 1e9
    return [
        Rate(
            name,
            size,
            best_gb_s=gigabytes / min(seconds for seconds, _, _ in results),
            median_gb_s=gigabytes / statistics.median(seconds for seconds, _, _ in results),
            sender_cpu_s_per_gb=statistics.median(cpu for _, cpu, _ in results) / gigabytes,
            receiver_cpu_s_per_gb=statistics.median(cpu for _, _, cpu in results) / gigabytes,
        )
        for (name, size), results in taken.items()
    ]


def move_request(mode: str, length: int, tls: str, repeats: int = 3) -> RequestRow:
    """Hand one prompt's whole state to another process; the digests of both sides must agree."""
    memory, tables = open_request(mode, length)
    scramble(memory)
    peer = Peer("bench.transfer_state", mode, str(length), tls=tls)
    worker = TransferWorker(NixlPlane(f"bench-{uuid.uuid4().hex[:8]}", initiator=True))
    try:
        worker.start(memory.arena(), memory.regions())
        told = json.loads(peer.greeting)
        endpoint = endpoint_from_json(told["endpoint"])
        granted = {name: tuple(Run(**run) for run in runs) for name, runs in told["runs"].items()}
        link = worker.connect(endpoint).result(WAIT_S)
        source = spans(memory, tables, length)
        ours_at, theirs_at = memory.regions(), endpoint.regions
        started = time.process_time()
        writes = [
            write
            for c in memory.components()
            for write in plan_writes(c, c, source[c.name], granted[c.name], ours_at, theirs_at)
        ]
        plan_s = time.process_time() - started
        transfer_s, cpu_s = min(_push(worker, link, writes) for _ in range(repeats))
        started = time.process_time()
        ours = digests(memory, tables, length)
        digest_s = time.process_time() - started
        theirs = json.loads(peer.ask("digests"))
        assert ours == theirs, "state did not arrive"
        return RequestRow(
            pool_mode=mode,
            tls=tls or "default",
            prompt_tokens=length,
            num_bytes=sum(write.num_bytes for write in writes),
            num_writes=len(writes),
            plan_s=plan_s,
            transfer_s=transfer_s,
            sender_cpu_s=cpu_s,
            digest_s=digest_s,
            components=tuple(size_of(c, source[c.name]) for c in memory.components()),
        )
    finally:
        worker.close()
        peer.close()


def _push(worker: TransferWorker, link: Link, writes: Sequence[Write]) -> tuple[float, float]:
    """(seconds, CPU seconds of this process) of one hand-over."""
    used, started = time.process_time(), time.perf_counter()
    worker.submit(link, writes, None, WAIT_S).future.result(WAIT_S)
    return time.perf_counter() - started, time.process_time() - used


def conditions(arguments: argparse.Namespace) -> dict[str, Any]:
    load = os.getloadavg()
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "load_average_1m": round(load[0], 1),
        "torch": torch.__version__,
        "megabytes": arguments.megabytes,
        "rounds": arguments.rounds,
        "model_shape": f"DeepSeek-V4-Flash, {flash_config().num_layers} layers, bfloat16",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompts", type=int, nargs="*", default=[1000, 8000])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    measured = conditions(arguments)
    rates = compare_ways(arguments.megabytes << 20, arguments.rounds)
    rows = [
        move_request(mode, length, tls)
        for mode in ("paged", "unified")
        for length in arguments.prompts
        for tls in ("", "tcp")
    ]
    report = "\n\n".join(
        (
            "# Transfer benchmark",
            ", ".join(f"{name}: {value}" for name, value in measured.items()),
            rate_table(rates),
            request_table(rows),
            "Bytes by component:\n\n" + component_table(rows),
        )
    )
    print(report)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "transfer.md").write_text(report + "\n")
    plain = {
        "conditions": measured,
        "rates": [asdict(rate) for rate in rates],
        "requests": [asdict(row) for row in rows],
    }
    (RESULTS / "transfer.json").write_text(json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
