"""Kept pages give way to whoever needs memory, and never under somebody who reads them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sluice.config import EngineConfig, PoolConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.outputs import ChunkReady, Prefilled
from sluice.engine.radix import RadixTree
from sluice.errors import PoolError
from sluice.layout.component import Space
from sluice.layout.span import span
from sluice.pools.base import Occupancy, RequestTables
from sluice.types import Role
from tests.unit.engine.driving import run_all, run_until_idle
from tests.unit.engine.toy_history import HistoryDraft, HistoryToy
from tests.unit.engine.toy_model import ToyDraft, ToyTarget, prompt_of, request, toy_core

MODES = list(PoolMode)
PAGE, PAGES = 16, 8
FAMILIES: dict[str, tuple[Callable[[], ToyTarget], Callable[[], ToyDraft]]] = {
    "windows": (ToyTarget, ToyDraft),
    "history": (HistoryToy, HistoryDraft),
}


def _core(
    family: str, mode: PoolMode, role: Role = Role.PREFILL, max_bytes: int = 1 << 20
) -> EngineCore:
    target, draft = FAMILIES[family]
    pool = PoolConfig(
        mode=mode,
        page_tokens=PAGE,
        num_pages=PAGES,
        num_window_pages=20,
        num_slots=6,
        fill="nan",
    )
    config = EngineConfig(prefix_bytes=max_bytes, prefix_interval_tokens=PAGE)
    return toy_core(role, mode, target=target(), draft=draft(), config=config, pool=pool)


def _pages(core: EngineCore) -> Occupancy:
    (found,) = (one for one in core.memory.occupancy() if one.space is Space.PAGE)
    return found


def _prefill(core: EngineCore, name: str, prompt: tuple[int, ...]) -> ChunkReady:
    """Computed and held, as while a peer reads."""
    chunks: list[ChunkReady] = []
    one = request(name, prompt, max_tokens=4)
    core.submit(one, chunks.append)
    (done,) = run_until_idle(core)
    assert isinstance(done, Prefilled), done
    return chunks[-1]


def _live_bytes(core: EngineCore, tables: RequestTables, length: int) -> list[bytes]:
    return [
        core.memory.buffer(component.name, entry.layer_id)[run.first : run.first + run.count]
        .contiguous()
        .numpy()
        .tobytes()
        for component in core.memory.components()
        for entry in component.entries
        for run in span(component, tables, length)
    ]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pages_under_a_peers_read_stay_whatever_others_need(family: str, mode: PoolMode) -> None:
    """Two prompts share a beginning and are being sent; strangers push everything else out."""
    core, shared = _core(family, mode), prompt_of(40)
    first = _prefill(core, "a", shared)
    second = _prefill(core, "b", (*shared[:35], *prompt_of(10)))
    before = [
        _live_bytes(core, chunk.tables, length) for chunk, length in ((first, 40), (second, 45))
    ]
    for number in range(8):
        name = f"stranger-{number}"
        core.release(_prefill(core, name, prompt_of(28, number + 1)).request_id)
        core.memory.check()
    assert [
        _live_bytes(core, chunk.tables, length) for chunk, length in ((first, 40), (second, 45))
    ] == before
    core.release(first.request_id)
    assert _live_bytes(core, second.tables, 45) == before[1], "the writer left, a reader is there"
    core.release(second.request_id)
    assert core.memory.at_baseline()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_fits_an_engine_without_reuse_is_admitted_at_once(family: str, mode: PoolMode) -> None:
    core = _core(family, mode)
    for number in range(4):
        core.release(_prefill(core, f"r{number}", prompt_of(60, number)).request_id)
    assert _pages(core).cached > 0
    largest = prompt_of(PAGE * PAGES - 4, 9)  # with a verify step behind it every page there is
    chunk = _prefill(core, "largest", largest)
    assert _pages(core).cached == 0
    core.release(chunk.request_id)
    # The same again begins with pages that are cached, of which there are no others.
    again = _prefill(core, "again", (*largest[:-9], *prompt_of(9)))
    core.release(again.request_id)
    assert core.memory.at_baseline()


def test_a_shared_beginning_is_promised_once() -> None:
    core, shared = _core("history", PoolMode.PAGED), prompt_of(64)
    # 4 x 5 pages would not fit into 8.
    chunks = [_prefill(core, f"r{number}", (*shared, number + 1)) for number in range(4)]
    occupancy = _pages(core)
    assert (occupancy.held, occupancy.cached, occupancy.free) == (8, 0, 0)
    for chunk in chunks:
        core.release(chunk.request_id)
    assert _pages(core).cached == 4
    assert core.memory.at_baseline()


def test_prompt_scores_are_computed_not_reused() -> None:
    core, prompt = _core("windows", PoolMode.PAGED, Role.AGGREGATED), prompt_of(50)
    run_all(core, [request("a", prompt)])
    scored = request("b", prompt, prompt_logprobs=1)
    core.submit(scored)
    core.step()
    assert core._requests[scored.request_id].cached_tokens == 0
    run_until_idle(core)


def test_an_engine_that_never_evicts_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "evict_pages", lambda self, count: None)
    core = _core("history", PoolMode.PAGED)
    for number in range(2):
        core.release(_prefill(core, f"r{number}", prompt_of(60, number)).request_id)
    with pytest.raises(PoolError, match="evict cached items first"):
        _prefill(core, "largest", prompt_of(PAGE * PAGES - 4, 9))


def test_evicting_what_somebody_reads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    evict = RadixTree._evict_one

    def heedless(self: RadixTree, spared: object) -> bool:
        pages, self._pages = self._pages, _NobodyHolds(self._pages)
        try:
            return evict(self, ())
        finally:
            self._pages = pages

    monkeypatch.setattr(RadixTree, "_evict_one", heedless)
    core = _core("history", PoolMode.PAGED)
    _prefill(core, "read", prompt_of(60))
    core.release(_prefill(core, "gone", prompt_of(60, 1)).request_id)
    with pytest.raises(PoolError, match="can't be evicted: 1 requests hold it"):
        _prefill(core, "next", prompt_of(60, 2))


class _NobodyHolds:
    def __init__(self, pages: object) -> None:
        self._pages = pages

    def holders(self, page: int) -> int:
        return 0

    def evict(self, page: int) -> None:
        self._pages.evict(page)  # type: ignore[attr-defined]
