"""The dashboard and the autoscalers ask for metrics that the pods export, by labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest
import yaml

from sluice.telemetry.catalogue import ALL
from tests.chart.helm import CASES, CHART, Helm

EXPORTED = {metric.name: set(metric.labels) for metric in ALL}
FROM_PROMETHEUS = {"namespace", "pod", "le"}
_NAME = re.compile(r"\bsluice_[a-z_]+")
_LABELS = re.compile(r"\bby \(([^)]*)\)|([a-z_]+)=~?\"")


def base(name: str) -> str:
    """Of a histogram's series, the histogram."""
    for suffix in ("_bucket", "_sum", "_count"):
        if name.removesuffix(suffix) in EXPORTED and name not in EXPORTED:
            return name.removesuffix(suffix)
    return name


def expressions() -> Iterator[str]:
    board = json.loads((CHART / "dashboards/sluice.json").read_text(encoding="utf-8"))
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]


@pytest.mark.parametrize("expression", list(expressions()))
def test_the_dashboard_shows_what_is_exported(expression: str) -> None:
    names = {base(name) for name in _NAME.findall(expression)}
    assert names
    assert names <= EXPORTED.keys()
    known = set().union(*(EXPORTED[name] for name in names)) | FROM_PROMETHEUS
    asked = {
        label.strip()
        for many, one in _LABELS.findall(expression)
        for label in (many.split(",") if many else [one])
    }
    assert asked <= known


def test_the_dashboard_is_in_the_chart(helm4: Helm) -> None:
    (case,) = (c for c in CASES if c and c.stem == "monitoring")
    (board,) = (o for o in helm4.objects(case) if o["metadata"]["name"].endswith("-dashboard"))
    assert json.loads(board["data"]["sluice.json"])["title"] == "Sluice"


@pytest.mark.parametrize("name", ["hpa", "keda"])
def test_autoscalers_ask_for_what_is_exported(helm4: Helm, name: str) -> None:
    (case,) = (c for c in CASES if c and c.stem == name)
    scalers = [
        o for o in helm4.objects(case) if o["kind"] in ("HorizontalPodAutoscaler", "ScaledObject")
    ]
    assert len(scalers) == 3
    names = set(_NAME.findall(yaml.safe_dump(scalers)))
    assert names == {"sluice_pod_queued_requests", "sluice_pod_running_requests"}
    assert names <= EXPORTED.keys()
