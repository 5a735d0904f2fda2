"""``sluice layout show|diff|check``: a pod's state layout, and whether two pods may exchange state.

A source is a saved file or the address of a running pod of either role; ``check --values`` asks what pods of a chart's
values would declare, before there are any. Exit codes: 0 agreed (or nothing wrong), 1 refused (or a rule is broken), 2
the question itself could not be asked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from sluice.cli.layout_sources import read_layouts
from sluice.cli.layout_values import layouts_of_values
from sluice.cli.operator import add_tls_arguments, channel_of
from sluice.errors import ConfigError, GeometryError, SluiceError
from sluice.layout.consistency import check_layout
from sluice.layout.encoding import encode
from sluice.layout.explain import explain_layout, explain_outcome
from sluice.layout.negotiate import Agreement, Refusal, negotiate
from sluice.layout.outcome import Mismatch

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

AGREED, REFUSED, USAGE = 0, 1, 2
_SOURCE = "a saved layout file, or host:port of a running pod"


def add_parser(subparsers: Subparsers) -> None:
    """Register ``layout`` with its three commands; each sets ``run`` to a function of the arguments
    that returns the exit code."""
    parser = subparsers.add_parser("layout", help="what state pods have, and whether it fits")
    commands = parser.add_subparsers(dest="command", required=True, metavar="show|diff|check")
    show = _command(commands, "show", _show, "print a pod's components and what they cost")
    show.add_argument("source", help=_SOURCE)
    show.add_argument("--tokens", type=_positive, metavar="L", help="also: what L tokens move")
    show.add_argument("--save", type=Path, metavar="FILE", help="write the layout to FILE")
    for name, run, about in (
        ("diff", _diff, "print every difference between two pods and what to change"),
        ("check", _check, "one line for scripts; with one source, the pod's own rules"),
    ):
        command = _command(commands, name, run, about)
        optional = "?" if name == "check" else None
        command.add_argument("prefill", help=_SOURCE, nargs=optional)
        command.add_argument("decode", help=_SOURCE, nargs=optional)
        if name == "check":
            _add_values(command)
        command.add_argument(
            "--allow-missing-draft",
            action="store_true",
            help="accept a draft on one pod only: its state is then not sent",
        )


def _add_values(command: argparse.ArgumentParser) -> None:
    about = "instead of sources: the chart's values that pods would be installed with; repeatable"
    command.add_argument("--values", type=Path, action="append", metavar="FILE", help=about)
    command.add_argument(
        "--chart", type=Path, default=Path("deploy/helm/sluice"), metavar="FOLDER", help="the chart"
    )
    command.add_argument("--helm", default="helm", metavar="PROGRAM", help="Helm 3 or 4")
    command.add_argument(
        "--model", metavar="FOLDER", help="a folder here with the checkpoint's config.json"
    )


def _command(
    commands: Subparsers, name: str, run: Callable[[argparse.Namespace], int], about: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=about, description=about)
    command.add_argument("--json", action="store_true", help="print JSON instead of text")
    command.add_argument(
        "--timeout-s", type=float, default=5.0, help="how long to wait for a running pod"
    )
    add_tls_arguments(command)
    command.set_defaults(run=_or_usage(run))
    return command


def _or_usage(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """What keeps a source from being read is neither an agreement nor a refusal."""

    def guarded(args: argparse.Namespace) -> int:
        try:
            return run(args)
        except (SluiceError, OSError) as error:
            print(f"sluice layout: {error}", file=sys.stderr)
            return USAGE

    return guarded


def _show(args: argparse.Namespace) -> int:
    (layout,) = read_layouts([args.source], args.timeout_s, channel_of(args))
    if args.save is not None:
        args.save.write_text(encode(layout, indent=2) + "\n")
    if args.json:
        print(encode(layout, indent=2))
    else:
        print(explain_layout(layout, args.tokens), end="")
    return AGREED


def _diff(args: argparse.Namespace) -> int:
    outcome = _negotiate(args)
    print(_as_json(outcome) if args.json else explain_outcome(outcome), end="")
    return AGREED if isinstance(outcome, Agreement) else REFUSED


def _check(args: argparse.Namespace) -> int:
    if bool(args.values) == bool(args.prefill):
        raise ConfigError("give one or two sources, or --values")
    if args.decode is None and not args.values:
        return _check_one(args)
    outcome = _negotiate(args)
    if args.json:
        print(_as_json(outcome), end="")
    elif isinstance(outcome, Agreement):
        print(f"agreed {outcome.digest}")
    else:
        print(f"refused: {outcome.summary()}")
    return AGREED if isinstance(outcome, Agreement) else REFUSED


def _check_one(args: argparse.Namespace) -> int:
    (layout,) = read_layouts([args.prefill], args.timeout_s, channel_of(args))
    try:
        check_layout(layout)
    except GeometryError as error:
        _print_verdict(args.json, False, error.message, error.remedy)
        return REFUSED
    _print_verdict(args.json, True, "", "")
    return AGREED


def _print_verdict(as_json: bool, keeps_rules: bool, broken: str, remedy: str) -> None:
    if as_json:
        print(json.dumps({"ok": keeps_rules, "broken": broken, "remedy": remedy}, indent=2))
    else:
        print("ok" if keeps_rules else f"broken: {broken} ({remedy})")


def _negotiate(args: argparse.Namespace) -> Agreement | Refusal:
    if getattr(args, "values", None):
        prefill, decode = layouts_of_values(args.values, args.chart, args.helm, args.model)
    else:
        sources = [args.prefill, args.decode]
        prefill, decode = read_layouts(sources, args.timeout_s, channel_of(args))
    return negotiate(prefill, decode, allow_missing_draft=args.allow_missing_draft)


def _as_json(outcome: Agreement | Refusal) -> str:
    if isinstance(outcome, Agreement):
        document: dict[str, object] = {
            "agreed": True,
            "digest": outcome.digest,
            "components": outcome.components,
            "draft": outcome.draft.value,
            "mismatches": [_plain(mismatch) for mismatch in outcome.notes],
        }
    else:
        document = {"agreed": False, "mismatches": [_plain(m) for m in outcome.mismatches]}
    return json.dumps(document, indent=2) + "\n"


def _plain(mismatch: Mismatch) -> dict[str, str]:
    return {
        "path": mismatch.path,
        "prefill": mismatch.prefill_value,
        "decode": mismatch.decode_value,
        "severity": mismatch.severity.value,
        "explanation": mismatch.explanation,
        "remedy": mismatch.remedy,
    }


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(f"{text} is not a positive number")
    return number
