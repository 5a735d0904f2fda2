"""Mutual TLS between pods: certificate files that may be replaced at any time, and the role a certificate speaks for.

A certificate speaks for a role through a DNS name, ``<role>.sluice``. The same name serves both directions: TLS itself
checks it when a client connects (the client asks for ``prefill.sluice``, whatever address it dials), and the server
reads it from the client's certificate for every call.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from sluice.errors import ConfigError
from sluice.reload import Reloaded

_DOMAIN = ".sluice"


class PeerRole(Enum):
    """Who may be at the other end of a call."""

    ROUTER = "router"
    DECODE = "decode"
    PREFILL = "prefill"
    OPERATOR = "operator"  # a person at the command line

    @property
    def dns_name(self) -> str:
        """What a certificate of this role must have among its DNS names."""
        return self.value + _DOMAIN


@dataclass(frozen=True)
class TlsFiles:
    """PEM files: a certificate with its chain, its key without a pass phrase, and the CAs to trust."""

    cert: Path
    key: Path
    ca: Path

    def all(self) -> tuple[Path, Path, Path]:
        return (self.cert, self.key, self.ca)


@dataclass(frozen=True)
class TlsMaterial:
    """What the files held, PEM. Two of them are the same object only when nothing changed in between."""

    cert: bytes
    key: bytes
    ca: bytes
    not_after: str = ""  # until when the certificate holds, as OpenSSL writes it


def tls_files(cert: Path | None, key: Path | None, ca: Path | None) -> TlsFiles | None:
    """All three or none. Raises ValueError that says what is missing."""
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        given = {"tls_cert": cert, "tls_key": key, "tls_ca": ca}
        missing = ", ".join(name for name, value in given.items() if value is None)
        raise ValueError(f"tls_cert, tls_key and tls_ca belong together; missing: {missing}")
    return TlsFiles(cert, key, ca)


class Tls:
    """This process's certificate, as its files have it now. Raises `ConfigError` when they are no good at first."""

    def __init__(self, files: TlsFiles, role: PeerRole) -> None:
        self.role = role
        self._material = Reloaded(
            f"{role.value} certificate", files.all(), lambda: _read(files, role)
        )

    def current(self) -> TlsMaterial:
        """Cheap enough for every call: three ``stat`` unless the files changed. Any thread."""
        return self._material.get()


def roles_of(dns_names: Iterable[bytes | str]) -> frozenset[PeerRole]:
    """Roles that a certificate with these names speaks for."""
    names = {name.decode() if isinstance(name, bytes) else name for name in dns_names}
    return frozenset(role for role in PeerRole if role.dns_name in names)


def _read(files: TlsFiles, role: PeerRole) -> TlsMaterial:
    """Read the three files and prove that a peer that trusts the same CAs would accept them for ``role``."""
    try:
        cert, key, ca = (file.read_bytes() for file in files.all())
        not_after = _shake_hands(files, role)
    except (ssl.SSLError, OSError) as error:
        where = ", ".join(str(file) for file in files.all())
        raise ConfigError(
            f"certificate for role {role.value} ({where}): {error}",
            stage="tls",
            remedy=f"it must be in date, fit its key, be signed by a CA of the file, and have the DNS name "
            f"{role.dns_name} and the usages serverAuth and clientAuth",
        ) from error
    return TlsMaterial(cert, key, ca, not_after)


def _shake_hands(files: TlsFiles, role: PeerRole) -> str:
    """A TLS handshake of the certificate with itself, in memory: until when it holds. Raises ``ssl.SSLError``."""
    server_side, client_side = (
        _context(protocol, files) for protocol in (ssl.PROTOCOL_TLS_SERVER, ssl.PROTOCOL_TLS_CLIENT)
    )
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = client_side.wrap_bio(to_client, to_server, server_hostname=role.dns_name)
    server = server_side.wrap_bio(to_server, to_client, server_side=True)
    ends = [client, server]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            ends.remove(end)
    certificate = client.getpeercert() or {}
    return str(certificate.get("notAfter", ""))


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.load_cert_chain(
        files.cert, files.key, password=""
    )  # an encrypted key is an error, not a prompt
    context.load_verify_locations(files.ca)
    context.verify_mode = ssl.CERT_REQUIRED
    return context
