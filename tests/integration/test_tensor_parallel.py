"""Engines of 2 and 4 ranks give the tokens of one, for every family, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.ranks import LeadingCore
from sluice.models.base import ForwardBatch, Segment
from sluice.models.registry import load_model
from sluice.parallel.group import Parallel
from sluice.pools.memory import build_memory
from sluice.types import Request, RequestId, Role, Sampling
from tests.integration.tiny_folders import FAMILIES, save_tiny
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.parallel.ranks import run_ranks

POOL = PoolConfig(page_tokens=128, num_pages=12, num_window_pages=12, num_slots=6, fill="nan")
CONFIG = EngineConfig(max_batch_tokens=64)
UNDRAFTED = ("llama",)  # no draft is made for it: "drafting" would be "plain" again
RUNS = [(family, steps) for family in FAMILIES for steps in (None, 0)]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_tiny(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


def _requests(vocab: int) -> list[Request]:
    """Greedy and sampled, shorter and longer than a page, a window and a few chunks."""
    generator = torch.Generator().manual_seed(3)
    return [
        Request(
            RequestId(f"r{length}"),
            tuple(torch.randint(3, vocab, (length,), generator=generator).tolist()),
            Sampling(max_tokens=8, temperature=0.8 * (length % 2), seed=length, ignore_eos=True),
        )
        for length in (2, 33, 130)
    ]


def _core(
    folder: Path, steps: int | None, parallel: Parallel, config: EngineConfig = CONFIG
) -> EngineCore:
    spec = None if steps is None else SpecConfig(steps)
    core = build_engine(folder, Role.AGGREGATED, POOL, spec, config, parallel=parallel)
    if isinstance(core, LeadingCore):
        core.lead(lambda _turn: None)  # the test itself tells every rank
    return core


def _stories(folder: Path, steps: int | None, size: int) -> Sequence[dict[RequestId, Story]]:
    def work(parallel: Parallel) -> dict[RequestId, Story]:
        core = _core(folder, steps, parallel)
        told = run_all(core, _requests(core.info.vocab_size))
        assert core.memory.at_baseline()
        return told

    return run_ranks(size, work)


@pytest.mark.parametrize(
    ("family", "steps"),
    [run for run in RUNS if run[1] == 0 or run[0] not in UNDRAFTED],
    ids=lambda value: {None: "drafting", 0: "plain"}.get(value, value),
)
def test_the_tokens_of_one_rank(family: str, steps: int | None, folders: dict[str, Path]) -> None:
    folder = folders[family]
    (expected,) = _stories(folder, steps, 1)
    drafted = [
        count for story in expected.values() for count in story.accepted if count is not None
    ]
    assert bool(drafted) == (steps is None)
    for size in (2, 4):
        for rank, told in enumerate(_stories(folder, steps, size)):
            assert told == expected, f"rank {rank} of {size}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logits_of_one_rank(family: str, folders: dict[str, Path]) -> None:
    folder, ids = folders[family], tuple(range(3, 43))

    def work(parallel: Parallel) -> torch.Tensor:
        target = load_model(folder, draft=False, parallel=parallel).target
        memory = build_memory(target.state_needs("float32"), POOL, 1)
        tables = memory.open(RequestId("r"), len(ids))
        memory.extend(tables, len(ids))
        batch = ForwardBatch.build([Segment(tables, 0, ids)], memory)
        return target.logits(target.forward(batch, memory))

    (expected,) = run_ranks(1, work)
    for size in (2, 4):
        first, *others = run_ranks(size, work)
        torch.testing.assert_close(first, expected, rtol=0, atol=1e-4)
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_known_prefix_is_reused_alike(family: str, folders: dict[str, Path]) -> None:
    """A second turn behind the first one's prompt and answer: the tokens of an engine that keeps nothing,
    and as many rows reused as one rank reuses.
    """
    folder = folders[family]
    vocab, length = (64, 40) if family in ("llama", "qwen3") else (500, 300)

    def turns(prefix_bytes: int) -> Callable[[Parallel], list[tuple[Story, int]]]:
        def work(parallel: Parallel) -> list[tuple[Story, int]]:
            config = replace(CONFIG, prefix_bytes=prefix_bytes, prefix_interval_tokens=128)
            core = _core(folder, None, parallel, config)
            generator = torch.Generator().manual_seed(4)
            prompt = torch.randint(3, vocab, (length,), generator=generator).tolist()
            told = []
            for turn in range(2):
                name = RequestId(f"turn{turn}")
                core.submit(Request(name, tuple(prompt), Sampling(max_tokens=120, ignore_eos=True)))
                core.step()
                cached = core._requests[name].cached_tokens
                stories: dict[RequestId, Story] = {}
                tell(stories, run_until_idle(core))
                told.append((stories[name], cached))
                prompt += [*stories[name].tokens, 5, 6, 7]
            core.memory.check()
            return told

        return work

    (expected,) = run_ranks(1, turns(1 << 28))
    (cold,) = run_ranks(1, turns(0))
    assert [story for story, _ in expected] == [story for story, _ in cold]
    assert expected[1][1] >= 128
    assert run_ranks(2, turns(1 << 28)) == [expected] * 2


@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_of_one_model_share_its_identity(family: str, folders: dict[str, Path]) -> None:
    """Digests are of the whole checkpoint, of which no rank reads all."""
    folder = folders[family]
    (expected,) = run_ranks(1, lambda parallel: load_model(folder, parallel=parallel).target.info)
    assert run_ranks(2, lambda p: load_model(folder, parallel=p).target.info) == [expected] * 2


def test_a_width_that_does_not_divide_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(Exception, match="can't be shared equally by 3"):
        run_ranks(3, lambda parallel: load_model(folders["qwen3"], parallel=parallel))
