"""``sluice preflight``: does this node give a pod what it needs? Also the chart's init container.

Exit codes: 0 everything is there, 1 something is missing (each in one line, with its remedy), 2 it could not look.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from sluice.cli.places import model_folder
from sluice.cli.preflight_checks import Wanted, findings
from sluice.cli.preflight_facts import Host
from sluice.models.manifest import manifest_digest

ROLES = ("prefill", "decode", "router")


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    about = "does this machine have what a pod needs? reads the pod's own environment"
    parser = commands.add_parser("preflight", help=about, description=about)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--role", choices=ROLES, help="whose SLUICE_<ROLE>_* settings to read")
    what.add_argument(
        "--print-digest",
        metavar="MODEL",
        help="print the digest that --digest expects, and no more",
    )
    parser.add_argument("--digest", default="", help="the checkpoint that is expected")
    parser.add_argument("--rdma", action="store_true", help="the pod moves state over RDMA")
    parser.add_argument("--imex", action="store_true", help="the pod shares memory over NVLink")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Raises `CheckpointError` or `ConfigError` for the model of ``--print-digest``."""
    if args.print_digest:
        print(manifest_digest(Path(model_folder(args.print_digest))))
        return 0
    wanted = Wanted(args.role, os.environ, args.rdma, args.imex, args.digest)
    found = tuple(findings(wanted, Host()))
    good = all(finding.ok for finding in found)
    if args.json:
        print(json.dumps({"ok": good, "findings": [asdict(f) for f in found]}, indent=2))
    else:
        for finding in found:
            print(finding.line())
    return 0 if good else 1
