"""Where the command line finds a model folder and puts its logs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import sluice
from sluice.errors import ConfigError


def model_folder(name_or_path: str) -> Path:
    """A checkpoint folder by path, or by name under ``models/`` here or in the source tree.

    Raises `ConfigError` that lists where it looked.
    """
    source_tree = Path(sluice.__file__).resolve().parent.parent
    tried = [
        Path(name_or_path),
        Path("models") / name_or_path,
        source_tree / "models" / name_or_path,
    ]
    for folder in tried:
        if (folder / "config.json").is_file():
            return folder.resolve()
    places = ", ".join(dict.fromkeys(str(folder) for folder in tried))
    raise ConfigError(
        f"no model {name_or_path!r}: none of {places} has a config.json",
        stage="start",
        remedy="give the path of a checkpoint folder",
    )


def log_folder(chosen: str | None) -> Path:
    """``chosen``, made if need be, or a fresh folder among the machine's temporary files."""
    if chosen is None:
        return Path(tempfile.mkdtemp(prefix="sluice-logs-"))
    folder = Path(chosen)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
