"""Helm as the tests call it: version 4 or 3, lint and template, with values as files or as text."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy/helm/sluice"
VALUES = Path(__file__).parent / "values"
GOLDEN = Path(__file__).parent / "golden"
SCHEMAS = Path(__file__).parent / "schemas"
PRESETS = tuple(sorted(CHART.glob("values-*.yaml")))
CASES = (None, *PRESETS, *sorted(VALUES.glob("*.yaml")))  # None: the chart's own values
_CLAIM = "model: {pvc: {claimName: checkpoints}}"
OLDEST, NEWEST = "1.27", "1.37"  # Kubernetes that the chart supports


class HelmFailed(Exception):
    """Helm said no; its words are the message."""


@dataclass(frozen=True)
class Helm:
    program: Path

    def run(self, *arguments: str, values: str | None = None) -> str:
        """Standard output. ``values`` is YAML, read by a ``--values -`` among the arguments."""
        done = subprocess.run(
            [str(self.program), *arguments],
            input=values,
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode != 0:
            raise HelmFailed(done.stderr + done.stdout)
        return done.stdout

    def lint(self, *files: Path) -> str:
        return self.run("lint", "--strict", str(CHART), *_files(files))

    def template(
        self, *files: Path, values: str | None = None, kubernetes: str = NEWEST, show_only: str = ""
    ) -> str:
        """The manifests of a release called ``rel`` in namespace ``models``."""
        more = ["--values", "-"] if values is not None else []
        more += ["--show-only", show_only] if show_only else []
        return self.run(
            *("template", "rel", str(CHART), "--namespace", "models"),
            *("--kube-version", f"v{kubernetes}.0", *_files(files), *more),
            values=values,
        )

    @lru_cache  # noqa: B019  two programs, a few dozen renderings, one session
    def rendered(self, case: Path | None) -> str:
        """The manifests with the values of ``case``; a preset gets the claim that it leaves to the user."""
        values = _CLAIM if case is not None and case.parent == CHART else None
        return self.template(*(case,) if case else (), values=values)

    @lru_cache  # noqa: B019
    def objects(self, case: Path | None) -> list[dict[str, Any]]:
        """The same, parsed; shared by all tests, so nobody changes it."""
        return [thing for thing in yaml.load_all(self.rendered(case), yaml.CSafeLoader) if thing]


def find_helm(major: int) -> Helm:
    """``HELM4``/``HELM3``, else what ``make tools`` fetched. Skips the test when there is neither."""
    named = os.environ.get(f"HELM{major}")
    program = Path(named) if named else ROOT / ".cache/helm" / f"helm{major}"
    if not program.is_file():
        pytest.skip(f"no Helm {major} at {program}: run `make tools`, or set HELM{major}")
    return Helm(program)


def case_name(case: Path | None) -> str:
    return case.stem if case else "default"


def _files(files: tuple[Path, ...]) -> list[str]:
    return [argument for file in files for argument in ("--values", str(file))]
