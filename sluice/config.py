"""Frozen settings handed down from the services; the library itself never reads the environment."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class PoolMode(Enum):
    """How window state is kept. Both pods of a pair, and target and draft, use the same mode."""

    PAGED = "paged"  # window pages mapped from full pages by one shared mapping
    UNIFIED = "unified"  # per-request ring rows in front of the compressed pages


@dataclass(frozen=True)
class SpecConfig:
    """Speculative decoding: ``steps`` drafted tokens a step, ``steps + 1`` verified. 0 = off."""

    steps: int = 3
    topk: int = 1  # alternatives a position; more than one is a tree, which is refused

    @property
    def verify_tokens(self) -> int:
        return self.steps + 1


@dataclass(frozen=True)
class PoolConfig:
    """Sizes of the state memory. Page 0 and slot 0 are padding and come on top of these counts."""

    mode: PoolMode = PoolMode.PAGED
    page_tokens: int = 128  # logical tokens a page; a multiple of every compression ratio
    num_pages: int = 256
    num_window_pages: int = 64  # paged mode only
    num_slots: int = 16  # requests that can hold state at once
    kv_dtype: str = "float32"  # a torch name, or "mxfp8" for the families that can
    device: str = "cpu"
    fill: str | None = None  # "nan", "pattern": what a new request finds (debug, tests)
    # Decode context parallelism: history of latents is dealt token by token to so many ranks, of which this
    # is one. A page of the allocator then has page_tokens tokens on every one of them.
    context: int = 1
    context_rank: int = 0
    # Of state on each rank: as many pages as fit instead of num_pages; 0 = off.
    budget_bytes: int = 0

    @property
    def allocator_page_tokens(self) -> int:
        """Tokens of a page that is allocated and released, of all context-parallel ranks together."""
        return self.page_tokens * self.context


@dataclass(frozen=True)
class EngineConfig:
    """Step loop limits."""

    max_batch_tokens: int = 512  # token budget of one target forward
    max_running: int = 16
    max_queue: int = 256
    max_model_tokens: int = 4096  # prompt + output of one request
    # Share of a request's max_tokens that admission promises memory for. Below 1 more requests run at
    # once, and under pressure the youngest are taken off, backed up on the host, and brought back.
    promised_output: float = 1.0
    backup_bytes: int = 8 << 30  # of host memory that backups take, all together
    # Reuse of prompts' beginnings: pages of history stay where they are, all else is copied to the host
    # at every so many tokens (a multiple of the page), together up to so many bytes. 0 bytes = off.
    # Decode pods have no use for it.
    prefix_bytes: int = 0
    prefix_interval_tokens: int = 512
