"""``sluice layout check --values``: whether pods would agree, before anything is installed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.declared import NOT_READ, declared_layout
from services.decode.settings import DecodeSettings
from sluice.cli.__main__ import main
from sluice.engine.build import build_engine
from sluice.layout.layout import Layout
from sluice.types import Role
from tests.chart.helm import CHART, ROOT, Helm

MODELS = ROOT / "models"


def check(helm: Helm, tmp_path: Path, values: str, *words: str) -> int:
    file = tmp_path / "values.yaml"
    file.write_text(values)
    command = ["layout", "check", "--values", str(file), "--chart", str(CHART)]
    return main([*command, "--helm", str(helm.program), *words])


def test_values_that_dont_fit_are_refused_by_name(
    helm4: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number of pages may differ; what it is a page of may not."""
    values = "{engine: {page_tokens: 256}, decode: {settings: {page_tokens: 128, num_pages: 9}}}"
    assert check(helm4, tmp_path, values, "--json") == 1
    document = json.loads(capsys.readouterr().out)
    fatal = [m for m in document["mismatches"] if m["severity"] == "fatal"]
    assert "geometry.page_tokens" in {m["path"] for m in fatal}
    (mismatch,) = (m for m in fatal if m["path"] == "geometry.page_tokens")
    assert (mismatch["prefill"], mismatch["decode"]) == ("256", "128")


def test_a_checkpoint_elsewhere_is_named_by_its_configuration(
    helm4: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = "model: {source: pvc, pvc: {claimName: x}, path: kimi}"
    assert check(helm4, tmp_path, values) == 2
    assert "--model" in capsys.readouterr().err
    assert check(helm4, tmp_path, values, "--model", str(MODELS / "tiny-kimi")) == 0
    assert capsys.readouterr().out.startswith("agreed ")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ("router: {gpu: {count: 1}}", "the router computes nothing"),
        ("engine: {kv_dtype: int3}", "int3"),
    ],
)
def test_values_that_cant_work_are_no_refusal(
    helm4: Helm, tmp_path: Path, capsys: pytest.CaptureFixture[str], values: str, words: str
) -> None:
    assert check(helm4, tmp_path, values) == 2
    assert words in capsys.readouterr().err


def test_without_helm_it_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(Helm(tmp_path / "no-helm"), tmp_path, "{}") == 2
    assert "--helm" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["tiny-dsv4", "tiny-kimi"])
@pytest.mark.parametrize("steps", [None, 0])
def test_what_is_declared_is_what_the_pod_has(model: str, steps: int | None) -> None:
    """But for the weights' digests, which only the weights tell."""
    settings = DecodeSettings(
        model_dir=MODELS / model, num_pages=16, num_window_pages=8, num_slots=4, spec_steps=steps
    )
    pool, spec, engine = settings.pool(), settings.spec(), settings.engine()
    core = build_engine(settings.model_dir, Role.DECODE, pool, spec, engine)
    assert declared_layout(settings, Role.DECODE) == _without_digests(core.layout())


def _without_digests(layout: Layout) -> Layout:
    from dataclasses import replace

    draft = NOT_READ if layout.spec.draft_digest else ""
    return replace(
        layout,
        model=replace(layout.model, weights_digest=NOT_READ),
        spec=replace(layout.spec, draft_digest=draft),
    )
