"""Certificates for tests: a CA in this process, files for a role, replaced as a rotation would."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import trustme

from sluice.rpc.tls import PeerRole, TlsFiles

EXPIRED = datetime(2001, 1, 1, tzinfo=UTC)


def write_files(
    folder: Path,
    ca: trustme.CA,
    *names: str,
    trust: Sequence[trustme.CA] = (),
    not_after: datetime | None = None,
) -> TlsFiles:
    """A certificate of ``ca`` with these DNS names; trusts ``trust``, or ``ca``. Each file is replaced atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    files = TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")
    issued = ca.issue_cert(*names, not_after=not_after)
    replace(files.key, issued.private_key_pem.bytes())
    replace(files.cert, b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    replace(files.ca, b"".join(root.cert_pem.bytes() for root in trust or (ca,)))
    return files


def role_files(folder: Path, ca: trustme.CA, role: PeerRole) -> TlsFiles:
    return write_files(folder / role.value, ca, role.dns_name)


def replace(file: Path, content: bytes) -> None:
    new = file.with_suffix(".new")
    new.write_bytes(content)
    os.replace(new, file)
