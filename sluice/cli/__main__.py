"""The ``sluice`` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from sluice.cli import ab, chat, explain, keys, layout, pair, preflight, status, up
from sluice.cli.bench import command as bench
from sluice.errors import SluiceError


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 fine, 1 a check found something, 2 it could not run."""
    args = build_parser().parse_args(argv)
    try:
        code: int = args.run(args)
    except SluiceError as error:
        Console(stderr=True).print(f"[bold red]{error.code}[/]:", end=" ")
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True)
        return 2
    return code


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sluice", description="Disaggregated LLM serving.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for command in (up, chat, status, bench, pair, layout, preflight, explain, ab, keys):
        command.add_parser(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
