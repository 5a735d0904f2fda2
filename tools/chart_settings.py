"""Writes the services' settings into the chart's schema, so that `helm lint` refuses a misspelt one.

``python -m tools.chart_settings`` rewrites the part; ``--check`` only says whether it is up to date.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings

from services.decode.settings import DecodeSettings
from services.pod_settings import PodSettings
from services.prefill.settings import PrefillSettings
from services.router.settings import RouterSettings

SCHEMA = Path(__file__).parent.parent / "deploy/helm/sluice/values.schema.json"
# What the chart sets from values of its own; the rest is the user's, under `settings` or `engine`.
OF_THE_CHART = frozenset(
    """model_dir model_name listen advertise metrics_listen health_listen drain_s peers decodes prefills
    discovery discovery_file discovery_namespace discovery_selector
    tls_cert tls_key tls_ca http_tls_cert http_tls_key api_keys_file""".split()
)
FOR_TESTS = "fault_"  # no chart offers to break its pods
_KEPT = frozenset(
    """type enum minimum maximum exclusiveMinimum exclusiveMaximum minLength maxLength""".split()
)


def settings_schemas() -> dict[str, Any]:
    """By block of values: what ``engine`` and each role's ``settings`` may hold."""
    return {
        "shared": _object(PodSettings, PodSettings.model_fields),
        "router": _object(RouterSettings, RouterSettings.model_fields),
        "prefill": _object(PrefillSettings, PrefillSettings.model_fields),
        "decode": _object(DecodeSettings, DecodeSettings.model_fields),
    }


def rendered() -> str:
    """The whole schema file as it should be."""
    schema = json.loads(SCHEMA.read_text(encoding="utf-8"))
    schema["definitions"]["settings"] = settings_schemas()
    return json.dumps(schema, indent=2) + "\n"


def _object(settings: type[BaseSettings], names: Collection[str]) -> dict[str, Any]:
    described = settings.model_json_schema()
    offered = [n for n in names if n not in OF_THE_CHART and not n.startswith(FOR_TESTS)]
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": {
            name: _plain(described["properties"][name], described.get("$defs", {}))
            for name in offered
        },
    }


def _plain(field: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """One field without titles and defaults; "not set" is said by leaving it out."""
    if "$ref" in field:
        return _plain(definitions[field["$ref"].rpartition("/")[2]], definitions)
    if "anyOf" in field:
        (chosen,) = [option for option in field["anyOf"] if option.get("type") != "null"]
        return _plain(chosen, definitions)
    kept = {key: value for key, value in field.items() if key in _KEPT}
    if kept.get("type") == "array":  # comma lists in the environment
        return {"type": "string"}
    return kept


def main() -> int:
    wanted = rendered()
    if "--check" in sys.argv[1:]:
        return 0 if SCHEMA.read_text(encoding="utf-8") == wanted else 1
    SCHEMA.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
