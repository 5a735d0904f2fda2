"""The chart lints and renders with both Helms, to what is kept under golden/."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chart.golden import golden_files
from tests.chart.helm import CASES, CHART, GOLDEN, Helm, case_name


def test_lints_strictly(helm: Helm) -> None:
    helm.lint()
    helm.lint(CHART / "values-cpu.yaml")


def test_renders_what_is_kept(helm4: Helm) -> None:
    wanted = golden_files(helm4)
    kept = {file: file.read_text(encoding="utf-8") for file in GOLDEN.iterdir()}
    stale = sorted(f.name for f in wanted.keys() | kept.keys() if wanted.get(f) != kept.get(f))
    assert not stale, f"`make chart-golden`, then look at the difference: {stale}"


@pytest.mark.parametrize("case", CASES, ids=case_name)
def test_helm_3_renders_the_same(helm3: Helm, helm4: Helm, case: Path | None) -> None:
    old, new = _by_name(helm3, case), _by_name(helm4, case)
    assert old == new


def _by_name(helm: Helm, case: Path | None) -> dict[str, object]:
    return {f"{o['kind']}/{o['metadata']['name']}": o for o in helm.objects(case)}
