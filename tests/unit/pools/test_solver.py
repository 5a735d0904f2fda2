"""Pages for a budget: a draft's pool takes its room on every rank, workspaces are of gathered heads."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice.config import PoolConfig
from sluice.errors import ConfigError
from sluice.layout.component import Coverage, Kind, Owner
from sluice.layout.span import runs_of
from sluice.pools.base import BufferSpec
from sluice.pools.memory import build_memory
from sluice.pools.solver import attention_workspace_bytes, solve
from sluice.types import RequestId

LATENTS = BufferSpec(
    name="target.mla",
    owner=Owner.TARGET,
    kind=Kind.KV,
    coverage=Coverage.HISTORY,
    tokens_per_row=1,
    window_tokens=0,
    layer_ids=(0, 1),
    dtype="float32",
    row_shape=(8,),
    dealt=True,
)
DRAFT = replace(
    LATENTS,
    name="draft.kv",
    owner=Owner.DRAFT,
    layer_ids=(2,),
    row_shape=(1, 2, 4),
    dealt=False,
)
NEEDS = (LATENTS, DRAFT)
CONFIG = PoolConfig(page_tokens=4, num_pages=6, num_slots=2, context=4)


def test_draft_pool_not_scaled() -> None:
    """A row is 2 x 32 bytes of latents and 32 of the draft. On each of 4 ranks a page of 16 tokens has 4
    rows of latents, but 16 of the draft: counting 4 would promise four times the memory there is.
    """
    found = solve(NEEDS, CONFIG, 4, 10_000)
    assert dict(found.pages) == {"target.mla": 4 * 64, "draft.kv": 16 * 32}
    assert found.num_pages == (10_000 - found.page_bytes) // found.page_bytes
    assert found.num_tokens == found.num_pages * 16


def test_draft_pool_not_scaled_overruns_the_budget() -> None:
    """Counted as if it were dealt too, the draft's pool takes room that isn't there; held as if it were, the
    last page's rows aren't there either.
    """
    wrong = solve((LATENTS, replace(DRAFT, dealt=True)), CONFIG, 4, 10_000)
    assert len(build_memory(NEEDS, replace(CONFIG, num_pages=wrong.num_pages), 4).arena()) > 19_000
    memory = build_memory(NEEDS, CONFIG, 4)
    tables = memory.open(RequestId("a"), 6 * 16 - 4)
    memory.extend(tables, 6 * 16)
    (last,) = runs_of(memory.component("draft.kv"), tables, range(6 * 16 - 1, 6 * 16))
    assert last.first == len(memory.buffer("draft.kv", 2)) - 1
    assert last.first >= len(memory.buffer("target.mla", 0)), "as many rows as latents would not do"


def test_the_solution_is_what_the_memory_takes() -> None:
    found = solve(NEEDS, CONFIG, 4, 12_000, [("workspace", 500)])
    memory = build_memory(NEEDS, replace(CONFIG, num_pages=found.num_pages), 4)
    rounding = 4096  # the arena aligns buffers
    assert found.num_pages * found.page_bytes <= len(memory.arena()) <= 12_000 + rounding
    assert "workspace" in found.text()
    with pytest.raises(ConfigError, match="hold no page"):
        solve(NEEDS, CONFIG, 4, 1000)


def test_workspace_from_local_heads() -> None:
    """Partial results are of the heads of all ranks, whatever a rank's own are (TokenSpeed's formula)."""
    assert attention_workspace_bytes(32, 8 * 132, 512) == 132 * 32 * 8 * 513 * 4
    assert attention_workspace_bytes(4 * 8, 5, 512) == 4 * attention_workspace_bytes(8, 5, 512)
