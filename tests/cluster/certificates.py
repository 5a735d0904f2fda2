"""The release's TLS Secrets, from a CA of the test: made, replaced as cert-manager would, and used as a caller."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from pathlib import Path

import trustme

from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import PrefillClient
from sluice.rpc.tls import PeerRole, Tls, TlsFiles
from sluice.v1 import prefill_pb2
from tests.cluster.release import Release
from tests.unit.rpc.certificates import role_files

_TIMEOUT_S = 10.0


class Certificates:
    """One Secret a role, named ``tls-ROLE``; the files themselves are in ``folder``."""

    def __init__(self, release: Release, folder: Path) -> None:
        self._release = release
        self._folder = folder
        self._ca = trustme.CA()
        self._files: dict[PeerRole, TlsFiles] = {}
        self.settings = [
            "tls.enabled=true",
            *(f"tls.secrets.{role.value}=tls-{role.value}" for role in PeerRole),
        ]

    def issue(self) -> None:
        """New certificates for all roles, of the same CA."""
        for role in PeerRole:
            files = self._files[role] = role_files(self._folder, self._ca, role)
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "metadata": {"name": f"tls-{role.value}"},
                "stringData": {file.name: file.read_text() for file in files.all()},
            }
            manifest = self._folder / "secret.json"
            manifest.write_text(json.dumps(secret))
            self._release.kubectl("apply", "-f", str(manifest))

    def handshake(self, address: str, role: PeerRole | None) -> None:
        """Ask a prefill pod to pair, as ``role`` or without any certificate. Raises what it answers."""
        tls = Tls(self._files[role], role) if role else None

        async def ask() -> None:
            async with PrefillClient(address, ChannelConfig(tls=tls)) as client:
                await client.handshake(prefill_pb2.HandshakeRequest(), _TIMEOUT_S)

        asyncio.run(ask())

    def served(self, address: str) -> bytes:
        """The certificate that a new connection to a prefill pod meets, DER."""
        files = self._files[PeerRole.OPERATOR]
        context = ssl.create_default_context(cafile=str(files.ca))
        context.load_cert_chain(files.cert, files.key)
        context.set_alpn_protocols(["h2"])
        host, port = address.split(":")
        with (
            socket.create_connection((host, int(port)), timeout=_TIMEOUT_S) as raw,
            context.wrap_socket(raw, server_hostname=PeerRole.PREFILL.dns_name) as tls,
        ):
            return tls.getpeercert(binary_form=True) or b""
