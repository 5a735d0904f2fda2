"""Progress off a terminal: one plain line a change."""

from __future__ import annotations

import io

from rich.console import Console

from sluice.cli.progress import show_progress


def test_plain_lines() -> None:
    out = io.StringIO()
    with show_progress(Console(file=out), ("prefill", "decode")) as progress:
        progress.report("decode", "listening")
        progress.report("prefill", "ready")
    assert out.getvalue() == "decode: listening\nprefill: ready\n"


def test_a_terminal_gets_a_table_and_then_plain_lines() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80)
    with show_progress(console, ("prefill", "decode")) as progress:
        progress.report("decode", "ready")
        progress.close()
        assert "decode" in out.getvalue()
        assert "starting" in out.getvalue()
        before = len(out.getvalue())
        progress.report("decode", "stopping")
        assert out.getvalue()[before:] == "decode: stopping\n"
