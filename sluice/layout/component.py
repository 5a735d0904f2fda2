"""What one kind of request state is made of: components, their entries, and their live rows.

A *row* is the finest unit that has an address: one compressed entry, one token's window latent, one
tail row, one hidden vector. An *item* is ``rows_per_item`` consecutive rows (a page, a ring, a
slot). Physical row numbers are ``item * rows_per_item + offset``, so the bytes of a row lie at
``base + row * row_bytes`` in every entry. Rows, not items, are what is sent: a nearly empty page
costs nearly nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Owner(Enum):
    """Whose state it is. A draft's components always come after every target's."""

    TARGET = "target"
    DRAFT = "draft"


class Kind(Enum):
    """What the state means. Target and draft may share a kind; names are unique."""

    C4 = "C4"  # ratio-4 compressed entries
    C4_INDEXER = "C4_INDEXER"  # ratio-4 indexer keys
    C128 = "C128"  # ratio-128 compressed entries
    SWA = "SWA"  # sliding-window latents in window pages
    SWA_RING = "SWA_RING"  # sliding-window latents in per-request ring rows
    C4_TAIL = "C4_TAIL"  # pending (kv, gate) rows of the ratio-4 compressor
    C4_INDEXER_TAIL = "C4_INDEXER_TAIL"
    C128_TAIL = "C128_TAIL"
    HIDDEN = "HIDDEN"  # the draft's last hidden streams
    KV = "KV"  # plain key/value or latent pages
    KDA_CONV = "KDA_CONV"  # short-convolution inputs, [heads, columns, key | key | value]
    # The value names the layout: [values, keys] is as common, and square heads hide the difference.
    KDA_RECURRENT = "KDA_RECURRENT_HEADS_KEYS_VALUES"
    BLOCK_SCALE = "BLOCK_SCALE"  # scales of the component before it, which holds their values
    BLOCK_SCALE_SWA = "BLOCK_SCALE_SWA"  # the same for window state
    STATE_LENGTH = "STATE_LENGTH"  # how many tokens a request's recurrent state has taken in


SCALE_KINDS = frozenset({Kind.BLOCK_SCALE, Kind.BLOCK_SCALE_SWA})


class Space(Enum):
    """Which numbering an item index belongs to."""

    PAGE = "PAGE"
    WINDOW_PAGE = "WINDOW_PAGE"
    RING_ROW = "RING_ROW"
    REQUEST_SLOT = "REQUEST_SLOT"
    STATE_ROW = "STATE_ROW"


class Coverage(Enum):
    """Which logical rows of a prompt of L tokens (receiver already has D) are live.

    With R = ``tokens_per_row`` and W = ``window_tokens``; a row's ordinal is its first token // R.
    """

    HISTORY = "history"  # closed rows  [D // R, L // R); final as soon as they are written
    WINDOW = "window"  # the last W tokens  [max(0, L - W), L)
    # Open block plus the block before it: [W*(L//W) - W, L), W = ratio.
    OVERLAP_TAIL = "overlap_tail"
    # The open block only: [W*(L//W), L), W = ratio; empty when W divides L.
    OPEN_BLOCK = "open_block"
    LAST = "last"  # one row that belongs to the newest token


@dataclass(frozen=True)
class Entry:
    """One buffer of a component, usually one layer's."""

    layer_id: int
    dtype: str  # torch's short name: "float32", "bfloat16", "float8_e4m3fn", "uint8"
    row_shape: tuple[int, ...]
    row_bytes: int
    shard_axis: int | None = None  # axis of row_shape split over tensor-parallel ranks
    # Distinct parts it is split into, ``row_shape`` being one; 1: every rank has all of it.
    shards: int = 1


@dataclass(frozen=True)
class Component:
    """A named set of entries that share one row numbering.

    ``num_items`` is this pod's capacity (item 0 is padding and never transferred): exchanged, not
    compared. ``rows_per_item`` of history and window pages is compared; a ring's may differ
    between pods, because each side turns positions into rows by itself.
    """

    name: str
    owner: Owner
    kind: Kind
    space: Space
    coverage: Coverage
    tokens_per_row: int
    rows_per_item: int
    window_tokens: int  # W of the coverage rule; 0 where the rule has none
    num_items: int
    entries: tuple[Entry, ...]
    # Context-parallel ranks that rows are dealt to in turn: row r is on rank r % interleave, there as row
    # r // interleave. Rows, items and capacities above are counted over all of them.
    interleave: int = 1

    @property
    def bytes_per_row(self) -> int:
        """Bytes one logical row holds over all entries."""
        return sum(entry.row_bytes for entry in self.entries)

    @property
    def num_rows(self) -> int:
        return self.num_items * self.rows_per_item

    @property
    def own_rows(self) -> int:
        """Rows that one rank's buffers hold."""
        return self.num_rows // self.interleave
