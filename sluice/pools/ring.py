"""Which buffers share memory: a layer's window ring and its pages do in unified mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from sluice.errors import GeometryError
from sluice.layout.component import Component, Entry, Kind, Space
from sluice.pools.arena import Arena, ArenaPlan, Carve
from sluice.pools.storage import ComponentStorage, EntryBuffer

# What attention reads beside the window, in rows of the same width. Indexer keys stay apart.
_COMPRESSED = (Kind.C4, Kind.C128)


@dataclass(frozen=True)
class _Place:
    carve: Carve
    first_byte: int  # where the entry's row 0 is within the carve-out


class BufferPlan:
    """Reserves arena space for every entry of every component, then hands out the views."""

    def __init__(self, components: Sequence[Component]) -> None:
        self._components = tuple(components)
        self.arena = ArenaPlan()
        self._places: dict[tuple[str, int], _Place] = {}
        for component in self._components:
            for entry in component.entries:
                if (component.name, entry.layer_id) not in self._places:
                    self._reserve(component, entry)

    def build(self, arena: Arena) -> tuple[ComponentStorage, ...]:
        """Storage of each component, in the order given."""
        return tuple(
            ComponentStorage(
                component,
                tuple(
                    EntryBuffer.over(entry, self._view(arena, component, entry))
                    for entry in component.entries
                ),
            )
            for component in self._components
        )

    def _reserve(self, component: Component, entry: Entry) -> None:
        ring, pages = self._shared(component, entry)
        size = component.own_rows * entry.row_bytes
        if ring is None or pages is None:
            self._places[component.name, entry.layer_id] = _Place(self.arena.reserve(size), 0)
            return
        ring_bytes = ring.num_rows * entry.row_bytes
        carve = self.arena.reserve(ring_bytes + pages.num_rows * entry.row_bytes)
        self._places[ring.name, entry.layer_id] = _Place(carve, 0)
        self._places[pages.name, entry.layer_id] = _Place(carve, ring_bytes)

    def _shared(
        self, component: Component, entry: Entry
    ) -> tuple[Component | None, Component | None]:
        """The ring and the compressed pages of the layer, if ``component`` is one of them."""
        ring = self._of_layer(component, entry, lambda c: c.space is Space.RING_ROW)
        pages = self._of_layer(component, entry, lambda c: c.kind in _COMPRESSED)
        if ring is None or pages is None or component not in (ring, pages):
            return None, None
        formats = [
            (e.dtype, e.row_shape)
            for c in (ring, pages)
            for e in c.entries
            if e.layer_id == entry.layer_id
        ]
        if len(set(formats)) > 1:
            raise GeometryError(
                f"layer {entry.layer_id}: rows of {ring.name} are {formats[0]} and "
                f"of {pages.name} {formats[1]}",
                remedy="unified mode keeps both in one buffer; use one row format, or paged mode",
            )
        return ring, pages

    def _of_layer(
        self, component: Component, entry: Entry, wanted: Callable[[Component], bool]
    ) -> Component | None:
        for other in self._components:
            same_layer = any(e.layer_id == entry.layer_id for e in other.entries)
            if other.owner is component.owner and same_layer and wanted(other):
                return other
        return None

    def _view(self, arena: Arena, component: Component, entry: Entry) -> Tensor:
        place = self._places[component.name, entry.layer_id]
        return arena.rows(place.carve, place.first_byte, component.own_rows, entry.row_bytes)
