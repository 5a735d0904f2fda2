"""HTTPS for the router: a context whose certificate is the one its files have at each handshake."""

from __future__ import annotations

import ssl
from pathlib import Path

from sluice.errors import ConfigError
from sluice.reload import Reloaded


def https_context(cert: Path, key: Path) -> ssl.SSLContext:
    """TLS 1.2 or newer. Files that are no good are a `ConfigError` at first, and not taken later."""
    newest = Reloaded("https certificate", [cert, key], lambda: _context(cert, key))
    outer = _context(cert, key)

    # Called in every handshake, also in one that names no server; the certificate is sent after it.
    def choose(connection: ssl.SSLObject, _name: str | None, _outer: ssl.SSLContext) -> None:
        connection.context = newest.get()

    outer.sni_callback = choose
    return outer


def _context(cert: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An encrypted key is an error here, not a prompt.
        context.load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"certificate for HTTPS ({cert}, {key}): {error}",
            stage="tls",
            remedy="PEM files: a certificate with its chain, and its key without a pass phrase",
        ) from error
    return context
