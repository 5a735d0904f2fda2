"""A base image out of the packages that are installed on this Debian machine: no registry, no network, seconds.

``python -m tests.cluster.hostbase OUT.tar PACKAGE ...`` writes the files of the packages and of all they depend on.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable
from pathlib import Path

_LEFT_OUT = ("doc", "man", "locale", "info", "lintian")
_SKIPPED = tuple(f"/usr/share/{name}" for name in _LEFT_OUT)
_FOLDERS = {"tmp": 0o1777, "proc": 0o755, "sys": 0o755, "dev": 0o755, "run": 0o755, "root": 0o700}
_MADE_BY_INSTALLING = (
    "/etc/passwd /etc/group /etc/ld.so.cache /etc/nsswitch.conf /bin /lib /lib64 /sbin "
    "/etc/alternatives/awk /usr/bin/awk"
).split()


def write_base(out: Path, packages: Iterable[str]) -> int:
    """How many packages it took. Only works where ``dpkg`` does."""
    chosen = _closure(packages)
    listed = _run("dpkg", "-L", *sorted(chosen)).splitlines()
    files = {
        _resolved(path) for path in listed if path.startswith("/") and not path.startswith(_SKIPPED)
    }
    files |= {Path(path) for path in _MADE_BY_INSTALLING}
    with tarfile.open(out, "w") as tar:
        for name, mode in _FOLDERS.items():
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, mode
            tar.addfile(folder)
        for path in sorted(files):
            if path.is_symlink() or path.is_file():
                tar.add(path, arcname=str(path)[1:], recursive=False)
    return len(chosen)


def _closure(packages: Iterable[str]) -> set[str]:
    depends, provided_by = _installed()
    found: set[str] = set()
    left = list(packages)
    while left:
        name = left.pop()
        name = name if name in depends else provided_by.get(name, "")
        if name and name not in found:
            found.add(name)
            for choices in depends[name]:
                left += [c for c in choices if c in depends or c in provided_by][:1]
    return found


def _installed() -> tuple[dict[str, list[list[str]]], dict[str, str]]:
    """Dependencies of every installed package, each a list of alternatives, and who provides a name."""
    fields = "${Package}\t${db:Status-Abbrev}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    depends: dict[str, list[list[str]]] = {}
    provided_by: dict[str, str] = {}
    for line in _run("dpkg-query", "-W", f"-f={fields}").splitlines():
        name, status, needs, provides = line.split("\t")
        if status.startswith("ii"):
            depends[name] = [_names(group, "|") for group in needs.split(",") if group.strip()]
            provided_by.update(dict.fromkeys(_names(provides, ","), name))
    return depends, provided_by


def _names(text: str, separator: str) -> list[str]:
    """Package names without versions and architectures."""
    parts = (re.split(r"[ (:]", part.strip())[0] for part in text.split(separator))
    return [part for part in parts if part]


def _resolved(path: str) -> Path:
    """/lib/x is /usr/lib/x where /lib is a link: a layer with both would lose one."""
    given = Path(path)
    return given.parent.resolve() / given.name


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    print(write_base(Path(sys.argv[1]), sys.argv[2:]), "packages")
