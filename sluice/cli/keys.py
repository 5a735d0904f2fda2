"""``sluice keys``: make an API key for the router, and check a file of them."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console

from sluice.apikeys import ApiKey, checked_name, digest_of, new_secret, parse_keys
from sluice.errors import ConfigError


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser("keys", help="make API keys for the router, check a file of them")
    actions = parser.add_subparsers(required=True, metavar="action")
    new = actions.add_parser(
        "new", help="print a new key, once, and the line for the router's file"
    )
    new.add_argument("name", help="whose key it is; appears in logs")
    new.add_argument(
        "--max-concurrent", type=int, metavar="N", help="requests it may have running at once"
    )
    new.add_argument(
        "--operator", action="store_true", help="opens metrics and the status page too"
    )
    new.set_defaults(run=_new)
    check = actions.add_parser("check", help="is this file of keys well-formed? who is in it?")
    check.add_argument("file", type=Path)
    check.set_defaults(run=_check)


def _new(args: argparse.Namespace) -> int:
    if args.max_concurrent is not None and args.max_concurrent < 1:
        raise ConfigError("--max-concurrent must be at least 1", stage="keys")
    secret = new_secret()
    key = ApiKey(checked_name(args.name), digest_of(secret), args.max_concurrent, args.operator)
    out = Console(soft_wrap=True, highlight=False, markup=False)
    out.print(f"key for {key.name}; it is shown only now:\n\n  {secret}\n")
    out.print(f"line for the router's file (SLUICE_ROUTER_API_KEYS_FILE):\n\n  {key.line()}")
    return 0


def _check(args: argparse.Namespace) -> int:
    """Raises `ConfigError` for a file that the router would not take."""
    try:
        keys = parse_keys(args.file.read_text(encoding="utf-8"), str(args.file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {args.file}: {error}", stage="keys") from error
    out = Console(soft_wrap=True, highlight=False, markup=False)
    for key in keys:
        limit = "no limit" if key.max_concurrent is None else f"{key.max_concurrent} at once"
        out.print(f"{key.name}: {'operator, ' if key.operator else ''}{limit}")
    out.print(f"{len(keys)} keys" if keys else "no keys: every request would be refused")
    return 0
