"""Certificate files: what is refused before a pod starts with it, and what a rotation may break."""

from __future__ import annotations

from pathlib import Path

import pytest
import structlog
import trustme
from cryptography.hazmat.primitives import serialization

from sluice.errors import ConfigError
from sluice.rpc.tls import PeerRole, Tls, TlsFiles, roles_of, tls_files
from tests.unit.rpc.certificates import EXPIRED, replace, role_files, write_files


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


def test_the_current_content_changes_only_with_the_files(tmp_path: Path, ca: trustme.CA) -> None:
    tls = Tls(role_files(tmp_path, ca, PeerRole.DECODE), PeerRole.DECODE)
    first = tls.current()
    assert tls.current() is first
    assert first.not_after.endswith(" 3000 GMT")  # as trustme makes them
    files = role_files(tmp_path, ca, PeerRole.DECODE)
    assert tls.current().cert == files.cert.read_bytes() != first.cert


def _encrypted(files: TlsFiles) -> None:
    key = serialization.load_pem_private_key(files.key.read_bytes(), None)
    replace(
        files.key,
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        ),
    )


_SPOILERS = {
    "wrong_role": lambda files, ca: write_files(files.cert.parent, ca, "prefill.sluice"),
    "no_role": lambda files, ca: write_files(files.cert.parent, ca, "decode"),
    "expired": lambda files, ca: write_files(
        files.cert.parent, ca, "decode.sluice", not_after=EXPIRED
    ),
    "other_ca": lambda files, ca: write_files(
        files.cert.parent, ca, "decode.sluice", trust=[trustme.CA()]
    ),
    "not_its_key": lambda files, ca: replace(
        files.key, ca.issue_cert("decode.sluice").private_key_pem.bytes()
    ),
    "encrypted_key": lambda files, ca: _encrypted(files),
    "no_pem": lambda files, ca: replace(files.ca, b"nonsense"),
    "missing": lambda files, ca: files.ca.unlink(),
}


@pytest.mark.parametrize("spoil", _SPOILERS)
def test_files_that_no_peer_would_accept_are_refused_at_start_and_kept_out_later(
    tmp_path: Path, ca: trustme.CA, spoil: str
) -> None:
    files = role_files(tmp_path, ca, PeerRole.DECODE)
    tls = Tls(files, PeerRole.DECODE)
    good = tls.current()
    _SPOILERS[spoil](files, ca)
    with structlog.testing.capture_logs() as logs:
        assert tls.current() is good
    assert [log["event"] for log in logs] == ["reload_failed"]
    with pytest.raises(ConfigError, match="decode") as caught:
        Tls(files, PeerRole.DECODE)
    assert "decode.sluice" in caught.value.remedy
    assert str(files.cert) in caught.value.message


def test_roles_of_names() -> None:
    assert roles_of([b"decode.sluice", b"decode-0.default.svc"]) == {PeerRole.DECODE}
    assert roles_of(["router.sluice", "operator.sluice"]) == {PeerRole.ROUTER, PeerRole.OPERATOR}
    assert not roles_of([b"decode", b"sluice", b".sluice", b"decode.sluice.example", b"*.sluice"])


def test_all_three_or_none() -> None:
    assert tls_files(None, None, None) is None
    with pytest.raises(ValueError, match="missing: tls_key, tls_ca"):
        tls_files(Path("c"), None, None)
