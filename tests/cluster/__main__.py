"""``make test-cluster``: the chart on a real Kubernetes node, and an image built without a registry.

Needs root, Debian's etcd-server, containerd, runc, containernetworking-plugins, iptables and podman, and the Kubernetes
binaries in the folder that KUBEBUILDER_ASSETS names. Everything runs in private namespaces and ends with the command.
BUILD_ARGS goes to ``podman build``: certificates or a package mirror to mount, say. SLUICE_IMAGE names an archive with
localhost/sluice:test to use instead.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.cluster.archive import write_image
from tests.cluster.hostbase import write_base

ROOT = Path(__file__).parent.parent.parent
HERE = Path(__file__).parent
BUILD = ROOT / "build" / "cluster"
IMAGE = "localhost/sluice:test"
PROGRAMS = ("etcd", "containerd", "ctr", "runc", "iptables", "unshare", "gcc")
ASSETS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kube-proxy", "kubelet")
# What a slim Python image holds, as Debian's packages.
BASE_PACKAGES = (
    "python3 python3-venv bash dash coreutils findutils grep sed mawk libc-bin libstdc++6 ca-certificates login"
).split()
_IN_NAMESPACES = ("unshare", "--mount", "--net", "--pid", "--fork", "--kill-child")
_POOL = "sluice-test"  # the cgroup that node.sh makes
_SYSCTLS = ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")  # kubelet sets them


def main(arguments: list[str]) -> int:
    assets = Path(os.environ.get("KUBEBUILDER_ASSETS", ""))
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    missing += [name for name in ASSETS if not (assets / name).is_file()]
    if os.geteuid() != 0 or missing:
        print(
            f"test-cluster needs root and: {', '.join(missing) or 'nothing more'}", file=sys.stderr
        )
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    images = [pause_image(), sluice_image()]
    run = Path(tempfile.mkdtemp(prefix="sluice-node-", dir=BUILD))
    command = [sys.executable, "-m", "pytest", "-p", "no:randomly", "-x", "-v", "--timeout=900"]
    command += arguments or [str(HERE / "on_node.py")]
    with _kernel_settings_kept():
        done = subprocess.run(
            [*_IN_NAMESPACES, "bash", str(HERE / "node.sh"), *command],
            cwd=ROOT,
            env={
                **os.environ,
                "KUBEBUILDER_ASSETS": str(assets.resolve()),
                "RUN": str(run),
                "IMAGES": " ".join(map(str, images)),
                "PYTHON": sys.executable,
                "PYTHONPATH": str(ROOT),
            },
        )
    if done.returncode == 0:
        shutil.rmtree(run, ignore_errors=True)
    else:
        print(f"logs of the node: {run}/log", file=sys.stderr)
    return done.returncode


def pause_image() -> Path:
    out = BUILD / "pause.tar"
    if not out.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            program, layer = Path(scratch) / "pause", Path(scratch) / "layer.tar"
            subprocess.run(["gcc", "-static", "-Os", "-o", program, HERE / "pause.c"], check=True)
            subprocess.run(["tar", "-C", scratch, "-cf", layer, "pause"], check=True)
            write_image(out, "localhost/pause:1", [layer], {"Cmd": ["/pause"]})
    return out


def sluice_image() -> Path:
    """The Dockerfile, built by podman over a base of this machine's own packages; layers are kept between runs."""
    if given := os.environ.get("SLUICE_IMAGE"):
        return Path(given)
    out, base = BUILD / "sluice.tar", BUILD / "base.tar"
    settings = BUILD / "containers.conf"
    # Debian's crun refuses mixed cgroup versions, and a container may lack the right to raise limits.
    settings.write_text(
        '[containers]\ndefault_ulimits = ["nofile=20000:20000"]\n[engine]\nruntime = "runc"\n'
    )
    podman = ["podman", "--root", str(BUILD / "storage"), "--runroot", str(BUILD / "runroot")]
    environment = {**os.environ, "CONTAINERS_CONF": str(settings)}

    def run(*words: str) -> None:
        subprocess.run([*podman, *words], check=True, cwd=ROOT, env=environment)

    if not base.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            layer = Path(scratch) / "base.tar"
            write_base(layer, BASE_PACKAGES)
            path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
            write_image(base, "localhost/base:1", [layer], {"Env": [path]})
    run("load", "-q", "-i", str(base))
    run(
        *("build", "-q", "--network=host", "-f", "deploy/docker/Dockerfile", "-t", IMAGE),
        *("--build-arg=PYTHON_IMAGE=localhost/base:1", "--build-arg=RUNTIME_PACKAGES="),
        *shlex.split(os.environ.get("BUILD_ARGS", "")),
        ".",
    )
    out.unlink(missing_ok=True)
    run("save", "-q", "-o", str(out), IMAGE)
    return out


@contextmanager
def _kernel_settings_kept() -> Iterator[None]:
    """What a node leaves behind outside its namespaces: three settings and empty cgroups."""
    files = [Path("/proc/sys") / name for name in _SYSCTLS]
    before = {file: file.read_text() for file in files}
    try:
        yield
    finally:
        for file, value in before.items():
            file.write_text(value)
        for pool in Path("/sys/fs/cgroup").glob(f"*/{_POOL}"):
            for folder in sorted(pool.rglob("*/"), reverse=True):
                folder.rmdir() if folder.is_dir() else None
            pool.rmdir()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
