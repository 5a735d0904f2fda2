"""All state of one pod: builds the pools a model's needs call for, and concatenates them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.config import PoolConfig, PoolMode
from sluice.errors import GeometryError, Overloaded, PoolError
from sluice.layout.component import Component, Owner, Space
from sluice.layout.reshard import Deal, dealt, local_runs
from sluice.layout.span import Run
from sluice.pools.arena import Arena
from sluice.pools.base import (
    BatchTables,
    BufferSpec,
    Occupancy,
    Pool,
    Region,
    RequestTables,
    WindowMap,
)
from sluice.pools.geometry import (
    PoolBinding,
    PoolGeometry,
    check_draft,
    check_order,
    geometry_of,
)
from sluice.pools.paged import PagePool
from sluice.pools.ring import BufferPlan
from sluice.pools.slots import SlotPool
from sluice.pools.specs import component_name, components_of
from sluice.pools.storage import ComponentStorage, Fill, find
from sluice.pools.window import WindowPool
from sluice.types import RequestId


@dataclass
class _Opened:
    tables: RequestTables
    max_tokens: int
    quarantined: bool = False


class Memory:
    """``pools.base.StateMemory``. Not thread-safe: the engine's step thread makes every call.

    Components keep the order in which the model declared its needs, whatever pool each is in.
    """

    def __init__(
        self,
        needs: tuple[BufferSpec, ...],
        config: PoolConfig,
        verify_tokens: int,
        arena: Arena,
        storages: tuple[ComponentStorage, ...],
        window_map: WindowMap | None,
    ) -> None:
        self._needs = needs
        self._config = config
        self._verify_tokens = verify_tokens
        self._arena = arena
        self._storages = storages
        self._window_map = window_map
        self._fill = Fill.parse(config.fill)
        self._slots = SlotPool(_in_spaces(storages, *_SLOT_SPACES), config.num_slots, self._fill)
        # In the order of closing: window pages are found through full pages, both by slot.
        self._pages = self._page_pool()
        self._pools: tuple[Pool, ...] = (*self._window_pools(), self._pages, self._slots)
        self._open: dict[int, _Opened] = {}  # by slot

    def components(self) -> tuple[Component, ...]:
        return tuple(storage.component for storage in self._storages)

    def component(self, name: str) -> Component:
        """Raises ``PoolError`` naming what there is."""
        return find(self._storages, name).component

    def has(self, name: str) -> bool:
        return any(storage.component.name == name for storage in self._storages)

    def window_name(self, name: str) -> str:
        """What a spec's name became in this mode. Raises ``PoolError`` for an unknown name."""
        for spec in self._needs:
            if spec.name == name:
                return component_name(spec, self._config.mode)
        raise PoolError(
            f"no state {name!r} was declared; declared: {[s.name for s in self._needs]}"
        )

    def buffer(self, component: str, layer_id: int) -> Tensor:
        """[num_rows, *row_shape], a view into the arena."""
        return find(self._storages, component).buffer(layer_id)

    def regions(self) -> tuple[Region, ...]:
        """Where each entry lies, in component order; the address is that of the entry's row 0."""
        return tuple(
            Region(
                component=storage.component.name,
                layer_id=buffer.entry.layer_id,
                address=buffer.raw.data_ptr(),
                num_rows=storage.component.own_rows,
                row_bytes=buffer.entry.row_bytes,
            )
            for storage in self._storages
            for buffer in storage.buffers
        )

    def own_runs(
        self, component: Component, runs: Sequence[Run], first_ordinal: int
    ) -> tuple[Run, ...]:
        """Which of ``runs`` (from logical row ``first_ordinal`` on) this rank holds, as rows of its buffers."""
        deal = Deal(self._config.context_rank % component.interleave, component.interleave)
        return local_runs(dealt(runs, first_ordinal, deal), component)

    def arena(self) -> Tensor:
        return self._arena.bytes

    def geometry(self, owner: Owner = Owner.TARGET) -> PoolGeometry:
        """Page, window and ring sizes of the target's (or the draft's) state."""
        specs = [spec for spec in self._needs if spec.owner is owner]
        return geometry_of(specs, self._config, self._verify_tokens)

    def can_open(self, max_tokens: int, shared: Sequence[int] = ()) -> bool:
        return all(pool.can_open(max_tokens, shared) for pool in self._pools)

    def could_ever_open(self, max_tokens: int) -> bool:
        """Whether the request fits into an empty memory; if not, waiting is useless."""
        return all(
            pool.promise_for(max_tokens) <= one.total
            for pool in self._pools
            for one in pool.occupancy()
        )

    def open(
        self, request_id: RequestId, max_tokens: int, shared: Sequence[int] = ()
    ) -> RequestTables:
        """A slot with cleared state and a promise of everything ``max_tokens`` positions can need.

        ``shared``: kept pages that hold the history of its first tokens. It only reads them; its
        next position is behind them. Raises ``Overloaded`` when it doesn't fit beside what is
        promised already; nothing is kept then.
        """
        if not self.can_open(max_tokens, shared):
            raise Overloaded(
                f"state of {max_tokens} tokens doesn't fit: {self._shortage(max_tokens)}",
                stage="admit",
            )
        tables = RequestTables(
            request_id=request_id,
            page_tokens=self._config.allocator_page_tokens,
            slot=self._slots.take(),
            window_map=self._window_map,
        )
        for pool in self._pools:
            pool.open(tables, max_tokens, shared)
        self._open[tables.slot] = _Opened(tables, max_tokens)
        self._settle()
        return tables

    def grow(self, tables: RequestTables, max_tokens: int) -> bool:
        """Raise the request's promise to ``max_tokens`` positions. False when it doesn't fit beside
        the others'; then nothing has changed.
        """
        opened = self._usable(tables)
        if not all(pool.can_grow(tables, max_tokens) for pool in self._pools):
            return False
        for pool in self._pools:
            pool.grow(tables, max_tokens)
        opened.max_tokens = max(max_tokens, opened.max_tokens)
        return True

    @property
    def page_tokens(self) -> int:
        return self._config.allocator_page_tokens

    @property
    def page_bytes(self) -> int:
        """Bytes of history that one full page holds."""
        return self._pages.page_bytes

    def share(self, tables: RequestTables, pages: Sequence[int]) -> None:
        """Keep full pages of an open request, for others to begin with, until they are evicted.

        Raises ``PoolError`` for a page that isn't the request's own, or not yet wholly committed.
        """
        self._usable(tables)
        self._pages.share(tables, pages)

    def holders(self, page: int) -> int:
        """How many open requests hold a kept page. Raises ``PoolError`` for one that isn't kept."""
        return self._pages.holders(page)

    def evict(self, page: int) -> None:
        """Forget a kept page. Raises ``PoolError`` while a request holds it."""
        self._pages.evict(page)

    def evict_with(self, evict_some: Callable[[int], None]) -> None:
        """``evict_some(n)`` must evict until n more pages are free; it is called when a request takes
        pages it was promised and cached ones are in the way.
        """
        self._pages.evict_with(evict_some)

    def without_backup(self) -> tuple[str, ...]:
        """Components whose rows alone don't restore a request; empty for every pool there is."""
        return tuple(
            component.name
            for pool in self._pools
            if not pool.whole_in_rows
            for component in pool.components()
        )

    def extend(self, tables: RequestTables, num_tokens: int, live_from: int = 0) -> None:
        opened = self._usable(tables)
        limit = opened.max_tokens + self._verify_tokens
        if not 0 <= num_tokens <= limit:
            raise PoolError(
                f"request {tables.request_id}: {num_tokens} positions asked for, {limit} promised "
                f"({opened.max_tokens} and {self._verify_tokens} to verify)",
                remedy="open with a larger max_tokens",
            )
        # Full pages first: window pages are mapped from them.
        for pool in reversed(self._pools):
            pool.extend(tables, num_tokens, live_from)
        if self._fill is not Fill.NONE:
            self._settle()

    def advance(self, tables: RequestTables, committed_tokens: int) -> None:
        self._usable(tables)
        for pool in self._pools:
            pool.advance(tables, committed_tokens)

    def close(self, tables: RequestTables) -> None:
        slot = self._opened(tables).tables.slot
        for pool in self._pools:
            pool.close(tables)
        del self._open[slot]

    def quarantine(self, tables: RequestTables) -> None:
        opened = self._usable(tables)
        for pool in self._pools:
            pool.quarantine(tables)
        opened.quarantined = True

    def occupancy(self) -> tuple[Occupancy, ...]:
        """One a kind of item, in a fixed order: PAGE, WINDOW_PAGE (paged mode), REQUEST_SLOT."""
        found = [one for pool in self._pools for one in pool.occupancy()]
        order = (Space.PAGE, Space.WINDOW_PAGE, Space.REQUEST_SLOT)
        return tuple(sorted(found, key=lambda one: order.index(one.space)))

    def at_baseline(self) -> bool:
        """Nobody holds, is promised, or keeps quarantined anything. Cached pages are nobody's."""
        free = all(one.free + one.cached == one.total for one in self.occupancy())
        return free and not self._open and all(pool.promised() == 0 for pool in self._pools)

    def check(self) -> None:
        """Recount every pool. Raises ``PoolError`` when an item leaked or has two owners."""
        tables = [opened.tables for opened in self._open.values()]
        for pool in self._pools:
            pool.check(tables)

    def batch_tables(self, tables: Sequence[RequestTables]) -> BatchTables:
        width = max((len(one.pages) for one in tables), default=0)
        pages = [_padded(one.pages, width) for one in tables]
        windows = [_padded(self._window_pages(one), width) for one in tables]
        device = self.arena().device
        shape = (len(tables), width)
        return BatchTables(
            page_tokens=self._config.allocator_page_tokens,
            pages_SP=torch.tensor(pages, dtype=torch.int64, device=device).view(shape),
            window_pages_SP=torch.tensor(windows, dtype=torch.int64, device=device).view(shape),
            slots_S=torch.tensor([o.slot for o in tables], dtype=torch.int64, device=device),
        )

    def _window_pools(self) -> list[Pool]:
        config, in_window = self._config, _in_spaces(self._storages, Space.WINDOW_PAGE)
        if not in_window:
            return []
        assert self._window_map is not None, "window pages need the map"
        pool = WindowPool(
            in_window,
            self._window_map,
            config.num_window_pages,
            config.allocator_page_tokens,
            self._verify_tokens,
            self._fill,
        )
        return [pool]

    def _page_pool(self) -> PagePool:
        config, in_pages = self._config, _in_spaces(self._storages, Space.PAGE)
        return PagePool(
            in_pages,
            config.num_pages,
            config.allocator_page_tokens,
            self._verify_tokens,
            self._fill,
        )

    def _window_pages(self, tables: RequestTables) -> Sequence[int]:
        return [] if self._window_map is None else tables.page_table(Space.WINDOW_PAGE)

    def _opened(self, tables: RequestTables) -> _Opened:
        opened = self._open.get(tables.slot)
        if opened is None or opened.tables is not tables:
            raise PoolError(
                f"request {tables.request_id} (slot {tables.slot}) is not open in this memory"
            )
        return opened

    def _usable(self, tables: RequestTables) -> _Opened:
        opened = self._opened(tables)
        if opened.quarantined:
            raise PoolError(
                f"request {tables.request_id} (slot {tables.slot}) is quarantined",
                remedy="close it once the peer can't write any more",
            )
        return opened

    def _shortage(self, max_tokens: int) -> str:
        return "; ".join(
            f"{one.space.value}: needs {pool.promise_for(max_tokens)}, "
            f"{pool.promised()} of {one.total} promised"
            for pool in self._pools
            for one in pool.occupancy()
        )

    def _settle(self) -> None:
        """Clears must be done before a peer may write the same bytes: wait for the device."""
        device = self.arena().device
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def build_memory(needs: Sequence[BufferSpec], config: PoolConfig, verify_tokens: int) -> Memory:
    """The memory for a target's needs followed by its draft's.

    ``verify_tokens`` (T) is speculation steps + 1, or 1 without a draft; ring capacities follow it.
    Raises ``GeometryError`` when target and draft don't fit together (design, section 4) or sizes
    don't divide, and ``ConfigError`` for impossible settings.
    """
    specs = tuple(needs)
    if not specs:
        raise GeometryError("the model declares no state")
    Fill.parse(config.fill)
    components = components_of(specs, config, verify_tokens)
    window_map = WindowMap(config.num_pages + 1) if config.mode is PoolMode.PAGED else None
    _check_parts(specs, config, verify_tokens, window_map)
    plan = BufferPlan(components)
    arena = Arena(plan.arena, config.device)
    return Memory(specs, config, verify_tokens, arena, plan.build(arena), window_map)


def _check_parts(
    specs: tuple[BufferSpec, ...],
    config: PoolConfig,
    verify_tokens: int,
    window_map: WindowMap | None,
) -> None:
    check_order(specs)
    target, draft = (
        [spec for spec in specs if spec.owner is owner] for owner in (Owner.TARGET, Owner.DRAFT)
    )
    if draft:
        check_draft(
            PoolBinding(geometry_of(target, config, verify_tokens), window_map),
            PoolBinding(geometry_of(draft, config, verify_tokens), window_map),
        )


_SLOT_SPACES = (Space.RING_ROW, Space.STATE_ROW, Space.REQUEST_SLOT)


def _in_spaces(
    storages: Sequence[ComponentStorage], *spaces: Space
) -> tuple[ComponentStorage, ...]:
    return tuple(storage for storage in storages if storage.component.space in spaces)


def _padded(pages: Sequence[int], width: int) -> list[int]:
    return [*pages, *[0] * (width - len(pages))]
