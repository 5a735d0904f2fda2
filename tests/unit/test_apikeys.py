"""The file of API keys: what it may hold, what is refused, and who a secret belongs to."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice import apikeys
from sluice.apikeys import ApiKey, ApiKeys, checked_name, digest_of, new_secret, parse_keys
from sluice.errors import ConfigError

_HASH = "sha256:" + "ab" * 32


def test_a_line_reads_back_as_the_key_it_was_written_for() -> None:
    keys = (
        ApiKey("alice", digest_of("a")),
        ApiKey("bob@x.org", digest_of("b"), max_concurrent=3),
        ApiKey("ops", digest_of("c"), operator=True),
        ApiKey("all", digest_of("d"), max_concurrent=1, operator=True),
    )
    text = "# keys\n\n" + "\n".join(key.line() + "  # a remark" for key in keys)
    assert parse_keys(text, "f") == keys


@pytest.mark.parametrize(
    "line",
    [
        "alice",
        "alice sha256:abc",
        f"alice {_HASH.upper()}",
        f"alice md5:{'ab' * 32}",
        f"al/ice {_HASH}",
        f"alice {_HASH} max_concurrent=0",
        f"alice {_HASH} max_concurrent=-1",
        f"alice {_HASH} max_concurrent=many",
        f"alice {_HASH} admin",
        f"first {_HASH}",  # the same key again
        f"first sha256:{'cd' * 32}",  # the same name again
    ],
)
def test_a_bad_line_is_refused_with_its_number(line: str) -> None:
    with pytest.raises(ConfigError, match=r"keys\.txt, line 3: ") as caught:
        parse_keys(f"# one\nfirst {_HASH}\n{line}\n", "keys.txt")
    assert "sluice keys new" in caught.value.remedy


def test_a_key_pasted_for_its_hash_does_not_reach_the_log() -> None:
    secret = new_secret()
    for line in (f"alice {secret}", secret, f"alice {_HASH} {secret}"):
        with pytest.raises(ConfigError) as caught:
            parse_keys(line, "f")
        assert secret not in str(caught.value)


@given(st.text(alphabet="abz019 #=\t\n:sha256_maxoperent-é\x00", max_size=200))
def test_any_text_is_keys_or_a_refusal(text: str) -> None:
    with contextlib.suppress(ConfigError):
        for key in parse_keys(text, "f"):
            assert parse_keys(key.line(), "g") == (key,)


def test_secrets_are_long_and_all_different() -> None:
    secrets = {new_secret() for _ in range(50)}
    assert len(secrets) == 50
    assert all(len(secret) == len("sk-sluice-") + 43 for secret in secrets)


def test_find_compares_with_every_key_in_constant_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secrets = [new_secret() for _ in range(3)]
    file = tmp_path / "keys"
    file.write_text("\n".join(ApiKey(f"k{i}", digest_of(s)).line() for i, s in enumerate(secrets)))
    keys = ApiKeys(file)
    compared: list[bytes] = []
    really = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append(one)
        return really(one, other)

    monkeypatch.setattr(apikeys.hmac, "compare_digest", compare)
    for secret in [*secrets, new_secret()]:
        compared.clear()
        found = keys.find(secret)
        assert len(compared) == 3
        assert (found.name if found else None) == (
            f"k{secrets.index(secret)}" if secret in secrets else None
        )


def test_a_short_secret_is_never_accepted(tmp_path: Path) -> None:
    """Whoever hashes "password" into the file has a key that anybody finds; so it opens nothing."""
    file = tmp_path / "keys"
    file.write_text(f"alice sha256:{hashlib.sha256(b'password').hexdigest()}")
    assert ApiKeys(file).find("password") is None


def test_a_changed_file_counts_at_once_and_a_bad_one_never(tmp_path: Path) -> None:
    old, new = new_secret(), new_secret()
    file = tmp_path / "keys"
    file.write_text(ApiKey("old", digest_of(old)).line())
    keys = ApiKeys(file)
    assert keys.find(old) is not None
    file.write_text(ApiKey("new", digest_of(new)).line() + " nonsense")
    assert keys.find(old) is not None
    assert keys.find(new) is None
    file.write_text(ApiKey("new", digest_of(new)).line() + "\n")
    assert keys.find(old) is None
    assert keys.find(new) is not None
    file.write_text("# nobody\n")
    assert keys.find(new) is None


def test_a_missing_file_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="can't read the API keys"):
        ApiKeys(tmp_path / "none")


@pytest.mark.parametrize("name", ["", "a b", "a" * 65, "a\n", "ä"])
def test_names_that_could_not_stand_in_a_line(name: str) -> None:
    with pytest.raises(ConfigError, match="no name"):
        checked_name(name)
