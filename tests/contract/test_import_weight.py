"""What importing a package really loads; the static twin is the import-linter contracts."""

from __future__ import annotations

import subprocess
import sys

import pytest

_IMPORT_ALL = """
import importlib, pkgutil, sys
package = importlib.import_module(sys.argv[1])
walk = pkgutil.walk_packages(package.__path__, package.__name__ + ".")
for module in walk:
    if sys.argv[2] == "all" and not module.name.endswith("__main__"):
        importlib.import_module(module.name)
print(" ".join(name for name in sys.argv[3:] if name in sys.modules))
"""
_HEAVY = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "transformers")


@pytest.mark.parametrize(
    ("package", "modules", "forbidden"),
    [
        ("sluice", "top", (*_HEAVY, "numpy", "grpc", "google.protobuf")),
        ("sluice.layout", "all", (*_HEAVY, "numpy", "grpc", "google.protobuf")),
        ("sluice.rpc", "all", _HEAVY),
        ("services.router", "all", _HEAVY),
    ],
)
def test_package_loads_without(package: str, modules: str, forbidden: tuple[str, ...]) -> None:
    command = [sys.executable, "-c", _IMPORT_ALL, package, modules, *forbidden]
    loaded = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert loaded.stdout.split() == []
