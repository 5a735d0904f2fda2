"""Mistakes of a model on several ranks that leave it running, each put back in and seen: its logits are no longer
those of one rank, or more memory is used than was counted. A test has the name of its mistake.

Those of pools are in ``tests/unit/pools/test_solver.py``, of collectives in ``tests/unit/parallel/``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sluice.config import PoolConfig
from sluice.engine import build
from sluice.models.base import ForwardBatch, Segment
from sluice.models.kimi_linear import mla, plan, weights
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.kimi_linear.plan import Lengths
from sluice.models.registry import load_model
from sluice.parallel.context import NO_CONTEXT, ContextParallel, Partial, own_lengths
from sluice.parallel.group import SINGLE, Parallel
from sluice.pools.memory import build_memory
from sluice.types import RequestId
from tests.unit.parallel.ranks import run_contexts, run_ranks

MODEL = Path(__file__).parents[2] / "models" / "tiny-kimi"
PROMPT = tuple(range(3, 20))
DECODED = (30,)
VERIFIED = (31, 32, 33, 34)  # a token and D = 3 drafted ones
RANKS = 2
ROWS = len(PROMPT)  # of the widest step


def _target(parallel: Parallel, context: ContextParallel) -> KimiLinearTarget:
    target = load_model(MODEL, draft=False, parallel=parallel, context=context).target
    assert isinstance(target, KimiLinearTarget)
    return target


def _logits(parallel: Parallel, context: ContextParallel) -> Tensor:
    """Of the last token of a prompt, of one decoded alone, and of four verified at once."""
    target = _target(parallel, context)
    config = PoolConfig(
        page_tokens=4,
        num_pages=16,
        num_slots=2,
        fill="nan",
        context=context.size,
        context_rank=context.rank,
    )
    memory = build_memory(target.state_needs("float32"), config, len(VERIFIED))
    tables = memory.open(RequestId("r"), 32)
    memory.extend(tables, 32)  # a query that sees too much finds a page there

    def batch(ids: tuple[int, ...]) -> ForwardBatch:
        return ForwardBatch.build([Segment(tables, tables.kv_len, ids)], memory)

    rows = []
    for ids in (PROMPT, DECODED):
        rows.append(target.forward(batch(ids), memory)[-1:])
        tables.kv_len += len(ids)
    verified, pending = target.verify(batch(VERIFIED), memory, 1)
    pending.discard()
    return target.logits(torch.cat((*rows, verified)))


@pytest.fixture(scope="module")
def expected() -> Tensor:
    return _logits(SINGLE, NO_CONTEXT)


def _dealt() -> list[Tensor]:
    return run_contexts(
        RANKS, RANKS, lambda parallel, group: _logits(parallel, ContextParallel(group))
    )


def _far(found: Tensor, expected: Tensor) -> list[bool]:
    """Which of the six rows differ (NaN does)."""
    return [
        not bool(torch.allclose(a, b, rtol=0, atol=1e-4))
        for a, b in zip(found, expected, strict=True)
    ]


def test_unchanged_code_gives_the_logits_of_one_rank(expected: Tensor) -> None:
    for found in (*_dealt(), *run_ranks(RANKS, lambda parallel: _logits(parallel, NO_CONTEXT))):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def _adding(drafted: int, where: Callable[[int], bool]) -> Callable[[Tensor, int, int], Lengths]:
    """``lengths_of`` that adds D for rows of as many queries as ``where`` says."""

    def lengths_of(position_RN: Tensor, ranks: int, rank: int) -> Lengths:
        more = drafted if where(position_RN.shape[1]) else 0
        seen_RN = position_RN + 1 + more
        return Lengths(seen_RN, own_lengths(seen_RN, ranks, rank))

    return lengths_of


def test_d_added_twice(expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The segment has its drafted tokens already: with D on top, each query sees tokens after itself."""
    adding = _adding(len(VERIFIED) - 1, lambda queries: queries == len(VERIFIED))
    monkeypatch.setattr(plan, "lengths_of", adding)
    for found in _dealt():
        assert _far(found, expected) == [False, False, True, True, True, True]


def test_d_added_in_decode(expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token decoded alone has no drafts behind it: with D it sees rows that nobody has written."""
    monkeypatch.setattr(
        plan, "lengths_of", _adding(len(VERIFIED) - 1, lambda queries: queries == 1)
    )
    for found in _dealt():
        assert _far(found, expected)[:2] == [False, True]


def test_lengths_counted_per_rank(expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's own length where the whole request's is meant, so that it is divided twice."""

    def lengths_of(position_RN: Tensor, ranks: int, rank: int) -> Lengths:
        own_RN = own_lengths(position_RN + 1, ranks, rank)
        return Lengths(own_RN, own_lengths(own_RN, ranks, rank))

    monkeypatch.setattr(plan, "lengths_of", lengths_of)
    for found in _dealt():
        assert all(_far(found, expected))


def test_wrong_lse_base(expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's log-sums are natural; merged as powers of two they weigh the ranks' parts wrongly."""
    monkeypatch.setattr(mla, "LSE_BASE", 2.0)
    for found in _dealt():
        assert all(_far(found, expected))


def test_conv_resharded_as_one_block(expected: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank's part of the convolution is a part of its queries, keys and values each; one slice of the
    three end to end gives the first rank queries and half of the keys.
    """
    right = weights._conv

    def one_block(
        source: weights.TensorSource,
        prefix: str,
        config: weights.KimiLinearConfig,
        parallel: Parallel,
    ) -> Tensor:
        whole_WC = right(source, prefix, config, SINGLE)
        heads = config.kda.num_heads
        per_head = whole_WC.T.unflatten(0, (heads, -1))
        stacked = per_head.split([config.kda.key_dim] * 2 + [config.kda.value_dim], dim=1)
        blocks = torch.cat([part.flatten(0, 1) for part in stacked])
        width = len(blocks) // parallel.size
        return blocks[parallel.rank * width :][:width].T.contiguous()

    monkeypatch.setattr(weights, "_conv", one_block)
    for found in run_ranks(RANKS, lambda parallel: _logits(parallel, NO_CONTEXT)):
        assert all(_far(found, expected))


def _counted_workspace(parallel: Parallel, group: Parallel) -> int:
    target = _target(parallel, ContextParallel(group))
    (found,) = (
        num_bytes
        for name, num_bytes in build._workspaces(target, ContextParallel(group), ROWS, 1)
        if name == "attention's partial results"
    )
    return found


def test_workspace_from_local_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step's partial results really take is what was counted. Heads of one rank would be half of it."""
    taken: list[int] = []
    right = mla.merge

    def measured(partial: Partial, group: Parallel) -> Tensor:
        taken.append((partial.out.numel() + partial.lse.numel()) * 4)
        return right(partial, group)

    monkeypatch.setattr(mla, "merge", measured)
    _dealt()
    counted = run_contexts(RANKS, RANKS, _counted_workspace)
    assert counted == [max(taken)] * RANKS
    own = _target(SINGLE, NO_CONTEXT).local.mla
    for heads, enough in ((own.num_heads, True), (own.num_heads // RANKS, False)):
        needed = build.attention_workspace_bytes(heads, ROWS, own.latent_dim)
        assert (needed >= max(taken)) == enough
