"""What each service is doing: a live table on a terminal, one line a change elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

_DONE = ("ready", "stopped")


class Progress:
    """Call `report` on every change."""

    def __init__(self, console: Console, names: Sequence[str]) -> None:
        self._console = console
        self._states = dict.fromkeys(names, "starting")
        self._times: dict[str, float] = {}
        self._started = time.monotonic()
        self._live: Live | None = None
        if console.is_terminal:
            self._live = Live(self._table(), console=console, refresh_per_second=8, transient=False)
            self._live.start()

    def report(self, name: str, state: str) -> None:
        self._states[name] = state
        self._times[name] = time.monotonic() - self._started
        if self._live is not None:
            self._live.update(self._table())
        else:
            self._console.print(f"{name}: {state}", highlight=False, markup=False)

    def close(self) -> None:
        """Leave the table as it is; later reports are plain lines."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, state in self._states.items():
            done = state in _DONE
            mark = "[green]✓[/]" if done else Spinner("dots")
            seconds = f"{self._times[name]:.1f} s" if name in self._times else ""
            table.add_row(mark, f"[bold]{name}[/]", state, f"[dim]{seconds}[/]")
        return table


@contextmanager
def show_progress(console: Console, names: Sequence[str]) -> Iterator[Progress]:
    progress = Progress(console, names)
    try:
        yield progress
    finally:
        progress.close()
