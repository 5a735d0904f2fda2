"""The chart and the services speak of the same settings."""

from __future__ import annotations

from typing import Any

from services.decode.settings import DecodeSettings
from services.environment import refuse_unknown
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings
from tests.chart.helm import CASES, Helm
from tools.chart_settings import SCHEMA, rendered

SETTINGS = {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}


def test_the_schema_knows_every_setting() -> None:
    """Fails when a setting came or went: run `make chart-settings`."""
    assert SCHEMA.read_text(encoding="utf-8") == rendered()


def test_services_know_every_variable_the_chart_sets(helm4: Helm) -> None:
    for case in CASES:
        for role, environment in environments(helm4.objects(case)):
            refuse_unknown(environment, f"SLUICE_{role.upper()}_", SETTINGS[role].model_fields)


def environments(objects: list[dict[str, Any]]) -> list[tuple[str, dict[str, str]]]:
    """By role, for Deployments."""
    found = []
    for thing in objects:
        if thing["kind"] == "Deployment":
            (container, *_) = thing["spec"]["template"]["spec"]["containers"]
            variables = {e["name"]: e.get("value", "from the cluster") for e in container["env"]}
            found.append((container["name"], variables))
    return found


def test_numbers_arrive_as_they_were_written(helm4: Helm) -> None:
    """Helm reads every number as a float: a million pages would be 1.048576e+06."""
    (case,) = (c for c in CASES if c and c.stem == "gpu")
    by_role = dict(environments(helm4.objects(case)))
    assert by_role["decode"]["SLUICE_DECODE_NUM_PAGES"] == "1048576"
    assert by_role["decode"]["SLUICE_DECODE_PROMISED_OUTPUT"] == "0.5"
    assert by_role["decode"]["SLUICE_DECODE_DEVICE"] == "cuda"
