"""States of prompts' beginnings, kept on the host for prompts that begin alike.

A recurrent state exists at every depth but only once, so it can be reused only where somebody copied
it: at multiples of an interval, where a prefill chunk is made to end. Nothing is copied inside a verify
step, so there is no mask of unverified tokens to forget. Pages, windows and recurrent state are kept
together; a prefix without one of them could not be restored.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from sluice.models.snapshots import SnapshotGrid
from sluice.pools.backup import StateBackup, back_up, restore_chain
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory


class PrefixStore:
    """One piece an interval: the history of its tokens, and everything else as it was at its end.

    Pieces are named by all tokens up to their end, so a chain of them is a prefix. The least recently
    used one goes first; a deeper piece whose predecessor is gone is never found and ages out.
    """

    def __init__(self, memory: Memory, grid: SnapshotGrid, max_bytes: int) -> None:
        self.grid = grid
        self._memory = memory
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[bytes, StateBackup] = OrderedDict()
        self.num_bytes = 0

    def find(self, prompt: Sequence[int], limit: int) -> int:
        """The deepest kept depth of ``prompt``, at most ``limit``; 0 for none."""
        depth = 0
        for name, stop in self._names(prompt[: max(0, limit)]):
            if name not in self._pieces:
                break
            depth = stop
        return depth

    def restore(self, prompt: Sequence[int], depth: int, tables: RequestTables) -> None:
        """Copy a found prefix into items mapped for ``depth`` positions; ``kv_len`` becomes that."""
        names = [name for name, _ in self._names(prompt[:depth])]
        restore_chain(self._memory, [self._pieces[name] for name in names], tables)
        for name in reversed(names):  # a piece is of no use without those before it
            self._pieces.move_to_end(name)

    def keep(self, prompt: Sequence[int], tables: RequestTables) -> None:
        """Copy the newest interval's state, if ``tables.kv_len`` is at the end of one."""
        depth = tables.kv_len
        if depth == 0 or self.grid.deepest(depth) != depth:
            return
        *_, (name, _) = self._names(prompt[:depth])
        if name in self._pieces:
            return
        piece = back_up(self._memory, tables, have=depth - self.grid.interval_tokens)
        self._pieces[name] = piece
        self.num_bytes += piece.num_bytes
        while self.num_bytes > self._max_bytes:
            _, oldest = self._pieces.popitem(last=False)
            self.num_bytes -= oldest.num_bytes

    def _names(self, tokens: Sequence[int]) -> Iterator[tuple[bytes, int]]:
        """Name and end of every whole interval; a name depends on all tokens before its end."""
        step = self.grid.interval_tokens
        running = hashlib.sha256()
        for stop in range(step, len(tokens) + 1, step):
            block = tokens[stop - step : stop]
            running.update(b"".join(token.to_bytes(8, "little") for token in block))
            yield running.digest(), stop
