"""A real Kubernetes API server with its etcd on free ports, for tests: started, stopped, restarted.

The binaries are found as envtest finds them: in the folder that ``KUBEBUILDER_ASSETS`` names (etcd also on PATH).
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
import yaml

ASSETS = "KUBEBUILDER_ASSETS"
ADMIN, READER, STRANGER = (
    "admin",
    "reader",
    "stranger",
)  # users; the token is the name with "-token"
_TOKENS = f"""{ADMIN}-token,{ADMIN},{ADMIN},"system:masters"
{READER}-token,{READER},{READER}
{STRANGER}-token,{STRANGER},{STRANGER}
"""
_START_S = 60.0
# /readyz says ok a moment before the API groups are routed: until then they are 404.
_READY_PATHS = (
    "/readyz",
    "/api/v1/namespaces/default",
    *(f"/apis/{group}/v1" for group in ("apps", "rbac.authorization.k8s.io", "networking.k8s.io")),
)


def binary(name: str) -> Path:
    """A program of the test control plane. In CI its absence fails the test, elsewhere it skips."""
    folder = os.environ.get(ASSETS, "")
    if folder and (Path(folder) / name).is_file():
        return Path(folder) / name
    if name == "etcd" and (found := shutil.which(name)):
        return Path(found)
    pytest.skip(
        f"no {name} in {ASSETS}={folder!r}: set it to a folder with kube-apiserver and etcd, as setup-envtest makes"
        " (for etcd alone, Debian's etcd-server will do)"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class ApiServer:
    """Use as a context manager. ``flags`` go to kube-apiserver. No controllers run: nobody acts on what is made."""

    folder: Path
    flags: Sequence[str] = ()
    port: int = field(default_factory=free_port)
    _etcd_port: int = field(default_factory=free_port)
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    def __enter__(self) -> ApiServer:
        for name in ("etcd", "kube-apiserver"):
            binary(name)  # before anything is started
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tokens.csv").write_text(_TOKENS)
        self._make_keys()
        try:
            self._start_etcd()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in reversed(list(self._processes)):
            self._end(name)

    def start(self) -> None:
        """Start kube-apiserver (again) and wait until it is ready."""
        address = "127.0.0.1"
        key = self.folder / "sa.key"
        self._run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            f"--bind-address={address}",
            f"--advertise-address={address}",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder / 'certs'}",
            f"--token-auth-file={self.folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--endpoint-reconciler-type=none",
            "--disable-admission-plugins=ServiceAccount",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            *self.flags,
        )
        self._wait_ready()

    def stop(self) -> None:
        """End kube-apiserver; etcd keeps what it stored."""
        self._end("kube-apiserver")

    def restart(self) -> None:
        self.stop()
        self.start()

    def kubeconfig(self, user: str = ADMIN) -> Path:
        """A kubeconfig of one of the three users."""
        path = self.folder / f"{user}.kubeconfig"
        cluster = {"server": self.url, "insecure-skip-tls-verify": True}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": f"{user}-token"}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(content))
        return path

    def client(self, user: str = ADMIN) -> httpx.Client:
        """Plain HTTP with the user's token; close it."""
        return httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {user}-token"},
            verify=False,
            trust_env=False,
            timeout=10.0,
        )

    def _start_etcd(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{free_port()}"
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        )

    def _run(self, name: str, *arguments: str) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [str(binary(name)), *arguments], stdout=log, stderr=log, cwd=self.folder
            )

    def _end(self, name: str) -> None:
        """SIGKILL: an API server that drains its watches takes a minute, and a crash is what tests want."""
        process = self._processes.pop(name)
        process.kill()
        process.wait(timeout=10)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_S
        with self.client() as http:
            while time.monotonic() < deadline:
                try:
                    if all(http.get(path).status_code == 200 for path in _READY_PATHS):
                        return
                except httpx.TransportError:
                    pass
                process = self._processes["kube-apiserver"]
                assert process.poll() is None, self._log_tail("kube-apiserver")
                time.sleep(0.1)
        raise AssertionError(f"not ready in {_START_S:.0f} s: {self._log_tail('kube-apiserver')}")

    def _log_tail(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]

    def _make_keys(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        (self.folder / "sa.key").write_bytes(pem)
