"""What the pods of a chart's values would declare: Helm renders, the services read the environment they would get.

Nothing is deployed and no weights are read; the checkpoint's configuration files are enough.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from sluice.cli.places import model_folder
from sluice.errors import ConfigError
from sluice.layout.encoding import decode
from sluice.layout.layout import Layout

_TIMEOUT_S = 120.0
_BUILTIN = Path("/opt/sluice/models")  # where the image has its models


def layouts_of_values(
    files: Sequence[Path], chart: Path, helm: str, model: str | None
) -> tuple[Layout, Layout]:
    """Prefill's and decode's. ``model`` is a folder, or a name under models/, with the checkpoint's configuration;
    None: the values' own, if it is a built-in one.

    Raises `ConfigError`: values that Helm refuses, a role whose settings can't work, a model that isn't here.
    """
    words = [argument for file in files for argument in ("--values", str(file))]
    rendered = _run([helm, "template", "check", str(chart), *words], "helm", None)
    environments = _environments(rendered)
    return _declared("prefill", environments, model), _declared("decode", environments, model)


def _environments(rendered: str) -> dict[str, dict[str, str]]:
    """By role, what its container gets; values from the cluster are left out."""
    found = {}
    for document in yaml.safe_load_all(rendered):
        for container in _containers(document or {}):
            name = container["name"]
            found[name] = {e["name"]: str(e["value"]) for e in container["env"] if "value" in e}
    return found


def _containers(document: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a Deployment or of the leader of a LeaderWorkerSet."""
    spec = document.get("spec", {})
    template = spec.get("leaderWorkerTemplate", {}).get("leaderTemplate") or spec.get("template")
    return list(template["spec"]["containers"]) if template else []


def _declared(role: str, environments: dict[str, dict[str, str]], model: str | None) -> Layout:
    if role not in environments:
        raise ConfigError(f"the chart renders no {role} pods", remedy="is --chart Sluice's chart?")
    prefix = f"SLUICE_{role.upper()}_"
    settings = {k: v for k, v in environments[role].items() if k.startswith(prefix)}
    settings[f"{prefix}MODEL_DIR"] = str(_model(settings[f"{prefix}MODEL_DIR"], model))
    # Certificates and device are the node's; neither is part of a layout.
    settings = {k: v for k, v in settings.items() if not k.startswith(f"{prefix}TLS_")}
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
    command = [sys.executable, "-m", f"services.{role}", "--layout"]
    return decode(_run(command, role, inherited | settings))


def _model(mounted: str, given: str | None) -> Path:
    """The folder here that is ``mounted`` in the pods."""
    if given is not None:
        return model_folder(given)
    if Path(mounted).parent == _BUILTIN:
        return model_folder(Path(mounted).name)
    raise ConfigError(
        f"the checkpoint is at {mounted} in the pods",
        stage="start",
        remedy="name a folder here that has its config.json: --model FOLDER",
    )


def _run(command: Sequence[str], what: str, env: dict[str, str] | None) -> str:
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError as error:
        raise ConfigError(
            f"no program {command[0]!r}", remedy="install Helm, or name it: --helm"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{what} didn't answer within {_TIMEOUT_S:.0f} s") from error
    if done.returncode != 0:
        words = (done.stderr or done.stdout).strip()
        raise ConfigError(f"{what} says: {words}")
    return done.stdout
