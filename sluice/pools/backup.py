"""A request's state on the host: the live rows of every component, copied out and back.

What is copied is what a transfer would send for a prompt of ``kv_len`` tokens, so a request that
comes back finds what a decode pod finds that adopts it. No pool's type is looked at.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice.errors import ConfigError, PoolError
from sluice.layout.component import Component, Coverage
from sluice.layout.span import Run, span
from sluice.pools.base import RequestTables
from sluice.pools.memory import Memory


@dataclass(frozen=True)
class ComponentBackup:
    """One component's live rows in logical order; per entry (its layer) uint8 ``[rows, row_bytes]``."""

    name: str
    layers: tuple[int, ...]
    rows: tuple[Tensor, ...]


@dataclass(frozen=True)
class StateBackup:
    """One request's state between two steps, independent of the items it lay in: of history the rows
    of tokens ``have .. length``, of all else what is live at ``length``.
    """

    have: int
    length: int  # committed tokens
    draft_valid_from: int
    components: tuple[ComponentBackup, ...]

    @property
    def num_bytes(self) -> int:
        return sum(rows.numel() for component in self.components for rows in component.rows)


def check_backup(memory: Memory) -> None:
    """Call at start-up. Raises ``ConfigError`` naming components that rows alone can't restore."""
    missing = memory.without_backup()
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: the pool keeps state outside its rows, so a request under memory "
            f"pressure could be taken off but never restored",
            stage="start",
            remedy="keep the state in rows (whole_in_rows), or run the model where nothing decodes",
        )


def back_up(memory: Memory, tables: RequestTables, have: int = 0) -> StateBackup:
    """Copy out what ``tables.kv_len`` committed tokens left, but for history of the first ``have``.
    Waits for the device's last forward.

    Between steps only: rows of an open verify are nobody's state yet. Raises ``SpanMismatch`` for a
    live row that isn't mapped.
    """
    return StateBackup(
        have=have,
        length=tables.kv_len,
        draft_valid_from=tables.draft_valid_from,
        components=tuple(
            _copied(memory, component, span(component, tables, tables.kv_len, have))
            for component in memory.components()
        ),
    )


def restore(memory: Memory, backup: StateBackup, tables: RequestTables) -> None:
    """Copy everything back into other items, mapped for ``backup.length`` positions.

    Raises ``PoolError`` when the backup lacks a component or an entry, has one too many, or counts
    other rows; then ``tables`` must be closed. Nothing is ever skipped.
    """
    restore_chain(memory, (backup,), tables)


def restore_chain(memory: Memory, backups: Sequence[StateBackup], tables: RequestTables) -> None:
    """``restore`` from pieces, each of which continues the history of the one before it."""
    at = 0
    for backup in backups:
        if backup.have != at:
            raise PoolError(f"a backup of tokens {backup.have}.. follows one that ends at {at}")
        at = backup.length
        kept = {component.name: component for component in backup.components}
        wanted = [component.name for component in memory.components()]
        if sorted(kept) != sorted(wanted):
            raise PoolError(
                f"the backup has components {sorted(kept)}, the memory {sorted(wanted)}"
            )
        for component in memory.components():
            if component.coverage is Coverage.HISTORY or backup is backups[-1]:
                runs = span(component, tables, backup.length, backup.have)
                _put_back(memory, component, runs, kept[component.name])
    tables.kv_len = at
    tables.draft_valid_from = backups[-1].draft_valid_from


def _copied(memory: Memory, component: Component, runs: Sequence[Run]) -> ComponentBackup:
    rows = []
    for entry in component.entries:
        held = _row_bytes(memory, component, entry.layer_id)
        rows.append(held[_numbers(runs, held.device)].cpu())
    return ComponentBackup(component.name, _layers(component), tuple(rows))


def _put_back(
    memory: Memory, component: Component, runs: Sequence[Run], kept: ComponentBackup
) -> None:
    if kept.layers != _layers(component):
        raise PoolError(
            f"{component.name}: the backup has layers {kept.layers}, the memory {_layers(component)}"
        )
    for layer_id, saved in zip(kept.layers, kept.rows, strict=True):
        held = _row_bytes(memory, component, layer_id)
        numbers = _numbers(runs, held.device)
        if saved.shape != (len(numbers), held.shape[1]):
            raise PoolError(
                f"{component.name} layer {layer_id}: the backup is {tuple(saved.shape)} bytes, "
                f"the request's rows are {(len(numbers), held.shape[1])}"
            )
        held[numbers] = saved.to(held.device)


def _layers(component: Component) -> tuple[int, ...]:
    return tuple(entry.layer_id for entry in component.entries)


def _row_bytes(memory: Memory, component: Component, layer_id: int) -> Tensor:
    """The entry as uint8 ``[num_rows, row_bytes]``, a view: bytes have no NaN and no rounding."""
    buffer = memory.buffer(component.name, layer_id)
    return buffer.view(len(buffer), -1).view(torch.uint8)


def _numbers(runs: Sequence[Run], device: torch.device) -> Tensor:
    rows = [torch.arange(run.first, run.first + run.count, device=device) for run in runs]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64, device=device)
