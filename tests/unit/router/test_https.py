"""The HTTPS context refuses files that can't serve, naming them."""

from __future__ import annotations

from pathlib import Path

import pytest
import trustme

from services.router.https import https_context
from sluice.errors import ConfigError


def test_bad_files_are_refused(tmp_path: Path) -> None:
    one, other = (trustme.CA().issue_cert("localhost") for _ in range(2))
    cert, key = tmp_path / "crt", tmp_path / "key"
    cert.write_bytes(one.cert_chain_pems[0].bytes())
    with pytest.raises(ConfigError, match="No such file"):
        https_context(cert, key)
    key.write_bytes(other.private_key_pem.bytes())
    with pytest.raises(ConfigError, match="MISMATCH") as caught:
        https_context(cert, key)
    assert str(cert) in caught.value.message
    key.write_bytes(one.private_key_pem.bytes())
    https_context(cert, key)
