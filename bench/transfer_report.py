"""What ``bench.transfer`` found, as data and as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.transfer_state import ComponentSize


@dataclass(frozen=True)
class Rate:
    """One way at one page size over all rounds. CPU is user + system of both processes."""

    way: str
    page_bytes: int
    best_gb_s: float
    median_gb_s: float
    sender_cpu_s_per_gb: float
    receiver_cpu_s_per_gb: float


@dataclass(frozen=True)
class RequestRow:
    """One prompt's hand-over, prefill memory to decode memory in another process.

    Planning and digest are CPU seconds; the transfer is the quickest of a few, with the sender's CPU seconds.
    """

    pool_mode: str
    tls: str
    prompt_tokens: int
    num_bytes: int
    num_writes: int
    plan_s: float
    transfer_s: float
    sender_cpu_s: float
    digest_s: float
    components: tuple[ComponentSize, ...]


def rate_table(rates: Sequence[Rate]) -> str:
    lines = [
        "| page | way | best GB/s | median GB/s | sender CPU s/GB | receiver CPU s/GB |",
        "|---|---|---|---|---|---|",
    ]
    for rate in sorted(rates, key=lambda rate: rate.page_bytes):
        lines.append(
            f"| {rate.page_bytes >> 10} KB | {rate.way} | {rate.best_gb_s:.2f} "
            f"| {rate.median_gb_s:.2f} | {rate.sender_cpu_s_per_gb:.2f} "
            f"| {rate.receiver_cpu_s_per_gb:.2f} |"
        )
    return "\n".join(lines)


def request_table(rows: Sequence[RequestRow]) -> str:
    lines = [
        "| pools | UCX_TLS | prompt | MB | writes | transfer ms | GB/s | sender CPU ms | plan ms | digest ms |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row.pool_mode} | {row.tls} | {row.prompt_tokens} | {row.num_bytes / 1e6:.1f} "
            f"| {row.num_writes} | {row.transfer_s * 1e3:.1f} "
            f"| {row.num_bytes / row.transfer_s / 1e9:.2f} | {row.sender_cpu_s * 1e3:.1f} "
            f"| {row.plan_s * 1e3:.1f} | {row.digest_s * 1e3:.1f} |"
        )
    return "\n".join(lines)


def component_table(rows: Sequence[RequestRow]) -> str:
    columns = [row for row in rows if row.tls == "default"]
    header = [f"{row.pool_mode} {row.prompt_tokens}" for row in columns]
    lines = [
        "| component | " + " | ".join(header) + " |",
        "|---" * (len(header) + 1) + "|",
    ]
    names = list(dict.fromkeys(c.component for row in columns for c in row.components))
    for name in names:
        cells = []
        for row in columns:
            size = next((c for c in row.components if c.component == name), None)
            cells.append("" if size is None else f"{size.num_bytes:,}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)
