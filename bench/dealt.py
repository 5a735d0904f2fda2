"""What dealing a long prompt's latents to 2 and 4 decode ranks costs, row by row and packed in staging.

``python -m bench.dealt`` (``make bench-dealt``): one prefill process and a process for every decode rank, latents
of Kimi Linear's published shape (7 layers, 1,152 bytes a row). Both ways take turns in one run, so that a busy
moment hits both.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from bench.transfer import RESULTS, WAIT_S, Peer
from sluice.config import PoolConfig
from sluice.layout.component import Component, Coverage, Kind, Owner
from sluice.layout.outcome import ComponentPlan
from sluice.layout.reshard import reshard
from sluice.layout.span import Run, runs_of, slice_runs
from sluice.pools.base import BufferSpec, Region, RequestTables
from sluice.pools.memory import Memory, build_memory
from sluice.transfer.nixl import NixlPlane
from sluice.transfer.plane import Endpoint, Link, Movement
from sluice.transfer.staging import unpacked
from sluice.transfer.worker import TransferWorker
from sluice.transfer.writes import count_bytes, plan_writes
from sluice.types import RequestId
from tests.contract.target_process import endpoint_from_json

PAGE_TOKENS = 64
CHUNK_TOKENS = 2048
LATENTS = BufferSpec(
    name="target.mla",
    owner=Owner.TARGET,
    kind=Kind.KV,
    coverage=Coverage.HISTORY,
    tokens_per_row=1,
    window_tokens=0,
    layer_ids=(3, 7, 11, 15, 19, 23, 26),
    dtype="bfloat16",
    row_shape=(576,),
    dealt=True,
)


@dataclass(frozen=True)
class Row:
    """One way of one width over one path. Times are medians of the rounds, ``best_s`` the quickest."""

    ranks: int
    tls: str
    way: str
    num_bytes: int
    num_writes: int
    plan_cpu_s: float
    best_s: float
    median_s: float
    sender_cpu_s: float


@dataclass(frozen=True)
class Source:
    """A prompt's latents on the prefill side. A second prompt grew in turns with it, so no page has its neighbour;
    decode's pages are as scattered.
    """

    memory: Memory
    tables: RequestTables
    length: int

    @property
    def component(self) -> Component:
        return self.memory.component(LATENTS.name)


def open_source(length: int) -> Source:
    pages = -(-length // PAGE_TOKENS) + 1
    config = PoolConfig(page_tokens=PAGE_TOKENS, num_pages=2 * pages, num_slots=2)
    memory = build_memory([replace(LATENTS, dealt=False)], config, 1)
    ours, other = (memory.open(RequestId(name), length) for name in ("ours", "other"))
    for stop in range(PAGE_TOKENS, length + PAGE_TOKENS, PAGE_TOKENS):
        for tables in (ours, other):
            memory.extend(tables, min(stop, length))
    memory.arena().view(torch.int64).random_()
    return Source(memory, ours, length)


def dealt_component(source: Source, ranks: int) -> Component:
    """As decode ranks keep it, with twice the pages that the prompt needs."""
    wide = PAGE_TOKENS * ranks
    items = 2 * -(-source.length // wide) + 1
    return replace(source.component, rows_per_item=wide, num_items=items, interleave=ranks)


def target_regions(component: Component, endpoint: Endpoint) -> tuple[Region, ...]:
    at, found = endpoint.regions[0].address, []
    for entry in component.entries:
        found.append(
            Region(component.name, entry.layer_id, at, component.own_rows, entry.row_bytes)
        )
        at += component.own_rows * entry.row_bytes
    return tuple(found)


def plan(source: Source, target: Component, endpoints: Sequence[Endpoint]) -> list[list[Movement]]:
    """What goes to each rank, chunk by chunk as a prompt is computed."""
    shares = {
        pairing.target: pairing.shares[0]
        for pairing in reshard(
            [ComponentPlan(LATENTS.name, source.component, target)], 1, len(endpoints)
        )
    }
    moves: list[list[Movement]] = [[] for _ in endpoints]
    wide = target.rows_per_item
    every_second = [Run(page * wide, wide) for page in range(1, target.num_items, 2)]
    for start in range(0, source.length, CHUNK_TOKENS):
        chunk = range(start, min(start + CHUNK_TOKENS, source.length))
        ours = runs_of(source.component, source.tables, chunk)
        granted = slice_runs(every_second, start, len(chunk))
        for rank, endpoint in enumerate(endpoints):
            moves[rank] += plan_writes(
                source.component,
                target,
                ours,
                granted,
                source.memory.regions(),
                target_regions(target, endpoint),
                share=shares[rank],
                first_ordinal=start,
            )
    return moves


def push(
    worker: TransferWorker, links: Sequence[Link], moves: Sequence[Sequence[Movement]]
) -> tuple[float, float]:
    """(seconds, CPU seconds of this process) of all ranks' shares at once."""
    used, started = time.process_time(), time.perf_counter()
    tickets = [
        worker.submit(link, own, None, WAIT_S) for link, own in zip(links, moves, strict=True)
    ]
    for ticket in tickets:
        ticket.future.result(WAIT_S)
    return time.perf_counter() - started, time.process_time() - used


def measure(source: Source, ranks: int, tls: str, rounds: int) -> list[Row]:
    target = dealt_component(source, ranks)
    size = target.own_rows * target.bytes_per_row
    with ExitStack() as stack:
        peers = [
            Peer("tests.contract.target_process", f"dealt-{rank}", str(size), tls=tls)
            for rank in range(ranks)
        ]
        for peer in peers:
            stack.callback(peer.close)
        if tls:  # read when the agent is made
            os.environ["UCX_TLS"] = tls
            stack.callback(os.environ.pop, "UCX_TLS")
        worker = TransferWorker(NixlPlane(f"bench-{uuid.uuid4().hex[:8]}", initiator=True))
        worker.start(source.memory.arena(), source.memory.regions())
        stack.callback(worker.close)
        endpoints = [endpoint_from_json(peer.greeting) for peer in peers]
        links = [worker.connect(endpoint).result(WAIT_S) for endpoint in endpoints]
        started = time.process_time()
        packed = plan(source, target, endpoints)
        plan_s = time.process_time() - started
        ways = {"row by row": [unpacked(own) for own in packed], "packed": packed}
        taken: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for number in range(rounds + 1):
            for way, moves in ways.items():
                result = push(worker, links, moves)
                if number:  # the first round connects and faults pages in
                    taken[way].append(result)
        return [
            Row(
                ranks,
                tls or "default",
                way,
                sum(map(count_bytes, ways[way])),
                sum(map(len, ways[way])),
                plan_s,
                min(seconds for seconds, _ in results),
                statistics.median(seconds for seconds, _ in results),
                statistics.median(cpu for _, cpu in results),
            )
            for way, results in taken.items()
        ]


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| decode ranks | UCX_TLS | way | MB | writes | KB a write | best GB/s | median GB/s | sender CPU s/GB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gigabytes = row.num_bytes / 1e9
        lines.append(
            f"| {row.ranks} | {row.tls} | {row.way} | {row.num_bytes / 1e6:.0f} | {row.num_writes} "
            f"| {row.num_bytes / row.num_writes / 1024:.1f} | {gigabytes / row.best_s:.2f} "
            f"| {gigabytes / row.median_s:.2f} | {row.sender_cpu_s / gigabytes:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    source = open_source(arguments.tokens)
    rows = [
        row
        for ranks in arguments.ranks
        for tls in ("", "tcp")
        for row in measure(source, ranks, tls, arguments.rounds)
    ]
    plans = {row.ranks: row.plan_cpu_s for row in rows}
    report = "\n\n".join(
        (
            "# Latents dealt to decode ranks",
            f"{arguments.tokens} tokens, pages of {PAGE_TOKENS}, chunks of {CHUNK_TOKENS}, {arguments.rounds} rounds, "
            f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}",
            table(rows),
            "Planning: "
            + ", ".join(f"{plan_s * 1e3:.0f} ms CPU for {n} ranks" for n, plan_s in plans.items()),
        )
    )
    print(report)
    (RESULTS / "dealt.md").write_text(report + "\n")


if __name__ == "__main__":
    main()
