"""What a pool is: memory for some components and an allocator for their items, nothing else.

Everything that moves, digests, negotiates, backs up or explains state iterates ``components()`` and
addresses rows through ``layout.span``. A new kind of state is one new pool (or one more
``BufferSpec``), and nothing else changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from sluice.layout.component import Component, Coverage, Kind, Owner, Space
from sluice.types import RequestId

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class BufferSpec:
    """A kind of state a model needs, before anybody decides where it lives.

    The pool mode turns ``coverage`` into a space: HISTORY -> PAGE; WINDOW -> WINDOW_PAGE (paged) or
    RING_ROW (unified); OVERLAP_TAIL -> WINDOW_PAGE (paged) or STATE_ROW (unified); OPEN_BLOCK ->
    STATE_ROW; LAST -> REQUEST_SLOT.
    """

    name: str  # "target.c4"; a window's name gets the suffix "_ring" in unified mode
    owner: Owner
    kind: Kind
    coverage: Coverage
    tokens_per_row: int
    window_tokens: int
    layer_ids: tuple[int, ...]
    dtype: str
    row_shape: tuple[int, ...]
    shard_axis: int | None = None  # axis of row_shape that tensor-parallel ranks split
    shards: int = 1  # into how many distinct parts; row_shape is one of them
    dealt: bool = False  # history that context-parallel ranks hold in turn, where there are some


class WindowMap:
    """Full page id -> window page id, 0 = unmapped. One object for target and draft (paged mode).

    Identity matters: two equal maps drift apart at the first eviction, so pools compare with
    ``is``.
    """

    def __init__(self, num_pages: int) -> None:
        self._window_page_of = [0] * num_pages

    def __getitem__(self, page: int) -> int:
        return self._window_page_of[page]

    def set(self, page: int, window_page: int) -> None:
        self._window_page_of[page] = window_page


@dataclass
class RequestTables:
    """Where one request's state is, and how much of it is committed. Made by the memory, and its own.

    ``kv_len`` counts committed tokens (invariant between steps: ``len(prompt + output) - 1``).
    ``draft_valid_from`` masks draft window rows at lower positions (rows that never arrived).
    """

    request_id: RequestId
    page_tokens: int
    slot: int
    pages: list[int] = field(default_factory=list)
    window_map: WindowMap | None = None
    kv_len: int = 0
    draft_valid_from: int = 0

    def page_table(self, space: Space) -> Sequence[int]:
        """Page ids by ``position // page_tokens`` (``layout.span.Tables``)."""
        if space is Space.PAGE:
            return self.pages
        assert self.window_map is not None, "window pages exist in paged mode only"
        window_map = self.window_map
        return [window_map[page] for page in self.pages]


@dataclass(frozen=True)
class Region:
    """A registered stretch that holds an entry: row ``r`` is at ``address + r * row_bytes``."""

    component: str
    layer_id: int
    address: int
    num_rows: int
    row_bytes: int


@dataclass(frozen=True)
class Occupancy:
    """Items of one allocator. ``free + held + quarantined + cached == total`` (without padding)."""

    space: Space
    total: int
    free: int
    held: int
    quarantined: int
    cached: int = 0  # kept for prompts that begin alike, given up when somebody needs them


class Pool(Protocol):
    """Memory plus allocator for the components of one space."""

    whole_in_rows: bool
    """Whether a request's state lies wholly in the rows that ``layout.span`` names, so that copying
    those rows backs it up. No default: a pool that doesn't say can't be built on.
    """

    def components(self) -> tuple[Component, ...]: ...

    def buffer(self, component: str, layer_id: int) -> Tensor:
        """The entry as ``[num_rows, *row_shape]``, a view into the arena."""
        ...

    def promise_for(self, max_tokens: int) -> int:
        """Items a request of ``max_tokens`` positions can need at once, at worst."""
        ...

    def can_open(self, max_tokens: int, shared: Sequence[int]) -> bool:
        """Whether that worst case fits beside what is promised already."""
        ...

    def open(self, tables: RequestTables, max_tokens: int, shared: Sequence[int]) -> None:
        """Promise that worst case to the request in slot ``tables.slot``. Nothing is taken yet.

        ``shared``: kept full pages that the request begins with, and only ever reads.
        """
        ...

    def can_grow(self, tables: RequestTables, max_tokens: int) -> bool:
        """Whether the request's promise can rise to the worst case of ``max_tokens`` positions."""
        ...

    def grow(self, tables: RequestTables, max_tokens: int) -> None:
        """Raise it. Raises ``PoolError`` where ``can_grow`` says no."""
        ...

    def extend(self, tables: RequestTables, num_tokens: int, live_from: int) -> None:
        """Map items for positions < ``num_tokens``, the end of the next forward.

        Positions < ``live_from`` need no window state.

        Raises ``PoolError`` when the caller did not commit capacity first.
        """
        ...

    def advance(self, tables: RequestTables, committed_tokens: int) -> None:
        """Give back what positions >= ``committed_tokens`` can no longer see."""
        ...

    def close(self, tables: RequestTables) -> None: ...

    def quarantine(self, tables: RequestTables) -> None:
        """Take the request's items out of use; ``close`` once the peer is known drained."""
        ...

    def occupancy(self) -> tuple[Occupancy, ...]: ...

    def promised(self) -> int:
        """Items promised to open requests, taken or not; 0 when idle."""
        ...

    def check(self, tables: Sequence[RequestTables]) -> None:
        """Recount the books against all open requests' tables. Raises when they disagree."""
        ...


@dataclass(frozen=True)
class BatchTables:
    """Page tables of the requests of one forward, padded with 0, for vectorised row arithmetic.

    ``pages_SP``, ``window_pages_SP``: int64 [segments, pages]; ``slots_S``: int64 [segments].
    """

    page_tokens: int
    pages_SP: Tensor
    window_pages_SP: Tensor
    slots_S: Tensor


class StateMemory(Protocol):
    """All state of one pod: the concatenation of its pools, target's components first."""

    def components(self) -> tuple[Component, ...]: ...

    def component(self, name: str) -> Component: ...

    def has(self, name: str) -> bool: ...

    def window_name(self, name: str) -> str:
        """``target.swa`` -> ``target.swa`` (paged) or ``target.swa_ring`` (unified)."""
        ...

    def buffer(self, component: str, layer_id: int) -> Tensor: ...

    def regions(self) -> tuple[Region, ...]: ...

    def arena(self) -> Tensor:
        """The one uint8 tensor that holds every buffer: registered once, never freed."""
        ...

    def can_open(self, max_tokens: int, shared: Sequence[int] = ()) -> bool:
        """Whether a request of up to ``max_tokens`` positions fits beside what is promised."""
        ...

    def could_ever_open(self, max_tokens: int) -> bool:
        """Whether it fits into an empty memory; if not, waiting is useless."""
        ...

    def open(
        self, request_id: RequestId, max_tokens: int, shared: Sequence[int] = ()
    ) -> RequestTables:
        """Take a slot, promise capacity for ``max_tokens`` positions, or raise ``Overloaded``.

        ``shared``: kept full pages (``Memory.share``) that the request begins with, and only reads.
        """
        ...

    def extend(self, tables: RequestTables, num_tokens: int, live_from: int = 0) -> None:
        """Before each forward: map items up to ``num_tokens``, where that forward ends.

        Window pages are mapped for what a later step can read only, so extend chunk by chunk; a
        decode pod that receives a prompt of L tokens extends once, with ``live_from = max(0,
        L - W)``. Raises ``PoolError`` beyond what was promised at ``open``.
        """
        ...

    def advance(self, tables: RequestTables, committed_tokens: int) -> None:
        """After each commit: free window pages that no position >= ``committed_tokens`` reads.

        ``kv_len`` is the caller's to set. Raises ``PoolError`` when a row that is still read isn't
        mapped.
        """
        ...

    def close(self, tables: RequestTables) -> None:
        """Free everything, from use or from quarantine; ``tables`` is empty afterwards."""
        ...

    def quarantine(self, tables: RequestTables) -> None:
        """Take the items out of use, keep them from others; only ``close`` may follow."""
        ...

    def occupancy(self) -> tuple[Occupancy, ...]: ...

    def batch_tables(self, tables: Sequence[RequestTables]) -> BatchTables: ...
