"""Prompts that begin alike: the kept beginning changes nothing but the rows that are computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from sluice.config import EngineConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Prefilled, Reserved
from sluice.engine.prefix import PrefixStore
from sluice.engine.radix import Node
from sluice.errors import ConfigError
from sluice.models.base import ForwardBatch
from sluice.types import Request, RequestId, Role
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell
from tests.unit.engine.toy_history import HistoryToy, history_core
from tests.unit.engine.toy_model import (
    WINDOW,
    ToyTarget,
    copy_state,
    prompt_of,
    request,
    toy_core,
)
from tests.unit.engine.toy_recurrent import RecurrentToy, recurrent_core

MODES = list(PoolMode)
INTERVAL = 16
WARM = {"temperature": 0.9, "top_p": 0.95, "top_k": 8}
Make = Callable[..., EngineCore]
FAMILIES: dict[str, tuple[Make, type[ToyTarget]]] = {
    "windows": (toy_core, ToyTarget),
    "recurrent": (recurrent_core, RecurrentToy),
    "history": (history_core, HistoryToy),
}
BEGINNING = prompt_of(70)
# Where they part: nowhere, between depths, at a depth, inside the first interval.
PARTS = (70, 69, 50, 48, 33, 32, 17, 16, 3)


def _config(max_bytes: int = 1 << 20, budget: int = 512) -> EngineConfig:
    return EngineConfig(
        max_batch_tokens=budget, prefix_bytes=max_bytes, prefix_interval_tokens=INTERVAL
    )


def _requests() -> list[Request]:
    return [
        request(f"r{part}", (*BEGINNING[:part], *prompt_of(9, part)), seed=part, **WARM)
        for part in PARTS
    ]


class _Counting:
    """Prompt rows of each request that the target really ran."""

    def __init__(self, target: ToyTarget) -> None:
        self.target = target
        self.rows: dict[str, int] = {}
        target.before_forward = self._count

    def _count(self, batch: ForwardBatch) -> None:
        for segment in batch.segments:
            prompt = next(
                r.prompt for r in _requests() if r.request_id == segment.tables.request_id
            )
            rows = max(0, min(segment.stop, len(prompt)) - segment.start)
            name = segment.tables.request_id
            self.rows[name] = self.rows.get(name, 0) + rows


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("budget", [7, 512])
def test_reuse_changes_neither_tokens_nor_accepted_counts(
    mode: PoolMode, family: str, steps: int, budget: int
) -> None:
    """One after the other, so that each finds what those before it left. Fresh items hold NaN."""
    make, target = FAMILIES[family]
    counting = _Counting(target())
    core = make(mode=mode, steps=steps, target=counting.target, config=_config(budget=budget))
    expected = run_all(make(mode=mode, steps=steps), _requests())
    for one in _requests():
        assert run_all(core, [one]) == {one.request_id: expected[one.request_id]}
    window = WINDOW if steps and family != "history" else 1
    for one, part in list(zip(_requests(), PARTS, strict=True))[1:]:
        limit = min(part, len(one.prompt) - window)
        assert counting.rows[one.request_id] == len(one.prompt) - limit // INTERVAL * INTERVAL


@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_prompt_again_still_computes_a_row(family: str) -> None:
    make, _ = FAMILIES[family]
    core = make(steps=0, config=_config())
    stories = [run_all(core, [request("r", BEGINNING[:32])]) for _ in range(2)]
    assert stories[0] == stories[1]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reused_prompt_is_handed_over_whole(mode: PoolMode, family: str) -> None:
    make, _ = FAMILIES[family]
    requests = _requests()
    expected = run_all(make(mode=mode), requests)
    prefill = make(Role.PREFILL, mode, config=_config(budget=20))
    decode = make(Role.DECODE, mode, config=EngineConfig(prefix_bytes=1 << 20))
    stories: dict[RequestId, Story] = {}
    cached = {}
    for one in requests:
        chunks: list[ChunkReady] = []
        prefill.submit(one, chunks.append)
        (done,) = run_until_idle(prefill)
        assert isinstance(done, Prefilled)
        cached[one.request_id] = done.outcome.cached_tokens
        ends = [0, *(chunk.stop for chunk in chunks)]
        assert [chunk.start for chunk in chunks] == ends[:-1], "no row is left out"
        assert ends[-1] == len(one.prompt)
        decode.submit(one)
        (reserved,) = run_until_idle(decode)
        assert isinstance(reserved, Reserved)
        tables = reserved.reservation.tables
        copy_state(prefill.memory, chunks[-1].tables, decode.memory, tables, len(one.prompt))
        prefill.release(one.request_id)
        decode.adopt(one.request_id, done.outcome.first_token)
        tell(stories, run_until_idle(decode))
    assert stories == expected
    assert list(cached.values()) == [0, 64, 48, 48, 32, 32, 16, 16, 0]
    assert prefill.memory.at_baseline()


def _prefixes(core: EngineCore) -> PrefixStore:
    prefixes = core._scheduler._prefixes
    assert prefixes is not None
    return prefixes


def _known(core: EngineCore, prompt: Sequence[int]) -> int:
    return _prefixes(core).match(prompt, len(prompt) - 1).depth


def _states(core: EngineCore) -> list[Node]:
    """Nodes with a copy of state, shallow ones first."""
    nodes = [node for node in _prefixes(core)._tree._order if node.state is not None]
    return sorted(nodes, key=lambda node: node.state.length if node.state else 0)


def test_bytes_are_bounded_and_the_end_of_the_least_used_prefix_goes_first() -> None:
    core = toy_core(steps=0, config=_config())
    run_all(core, [request("a", BEGINNING, max_tokens=1)])
    four = _prefixes(core).num_bytes
    core = toy_core(steps=0, config=_config(max_bytes=four))
    other = prompt_of(20, 5)
    for prompt in (BEGINNING, BEGINNING, other):  # the second time uses what the first left
        run_all(core, [request("a", prompt, max_tokens=1)])
        assert 0 < _prefixes(core).num_bytes <= four
    assert _known(core, other) == 16
    assert _known(core, BEGINNING) == 48


def test_nothing_is_kept_when_it_is_off_or_too_little() -> None:
    core = toy_core(steps=0)
    assert core._scheduler._prefixes is None
    assert toy_core(Role.DECODE, config=_config())._scheduler._prefixes is None
    core = toy_core(steps=0, config=_config(max_bytes=1))
    for name in ("a", "b"):
        run_all(core, [request(name, BEGINNING)])
    assert _prefixes(core).num_bytes == 0


@pytest.mark.parametrize(("interval", "why"), [(24, "multiple of a page"), (2, "at least 4")])
def test_an_interval_off_the_grid_is_refused_at_start_up(interval: int, why: str) -> None:
    config = EngineConfig(prefix_bytes=1, prefix_interval_tokens=interval)
    with pytest.raises(ConfigError, match=why):
        toy_core(config=config)


def test_a_recurrent_state_of_another_depth_is_caught_by_its_length() -> None:
    core = recurrent_core(steps=0, config=_config())
    run_all(core, [request("a", BEGINNING)])
    first, last = (n for n in _states(core) if n.state and n.state.length in (16, 48))
    assert first.state is not None
    assert last.state is not None
    stale = {c.name: c for c in first.state.components if c.name.startswith("kda.")}
    mixed = tuple(stale.get(c.name, c) for c in last.state.components)
    last.state = replace(last.state, components=mixed)
    story = run_all(core, [request("b", BEGINNING)])[RequestId("b")]
    assert "has taken in 16 tokens" in str(story.error)
