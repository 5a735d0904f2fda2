"""The chart lints and renders with both Helms, to what is kept under golden/."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.chart.golden import CASES, GOLDEN, PRESETS, golden_files
from tests.chart.helm import Helm

CLAIM = "model: {pvc: {claimName: checkpoints}}"


@pytest.mark.parametrize("case", [None, *CASES], ids=lambda c: c.stem if c else "default")
def test_lints_strictly(helm: Helm, case: Path | None) -> None:
    helm.lint(*(case,) if case else ())


def test_renders_what_is_kept(helm4: Helm) -> None:
    wanted = golden_files(helm4)
    kept = {file: file.read_text(encoding="utf-8") for file in GOLDEN.iterdir()}
    stale = sorted(f.name for f in wanted.keys() | kept.keys() if wanted.get(f) != kept.get(f))
    assert not stale, f"`make chart-golden`, then look at the difference: {stale}"


@pytest.mark.parametrize("file", [*PRESETS, *CASES], ids=lambda f: f.stem)
def test_both_helms_render_the_same(helm4: Helm, helm: Helm, file: Path) -> None:
    if helm.program == helm4.program:
        return
    values = CLAIM if file in PRESETS else None
    assert _by_name(helm, file, values) == _by_name(helm4, file, values)


def _by_name(helm: Helm, file: Path, values: str | None) -> dict[str, str]:
    objects = helm.objects(file, values=values)
    return {f"{o['kind']}/{o['metadata']['name']}": yaml.safe_dump(o) for o in objects}
