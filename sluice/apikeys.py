"""API keys: how they are made, the file that holds their hashes, and looking one up.

A line of the file is ``name sha256:HEX [max_concurrent=N] [operator]``; blank lines and ``#`` comments are skipped.
Keys are 256 random bits, so nobody can try them out, whatever the hash costs: a plain SHA-256 is as safe as a slow hash
here, and a slow one would cost each request what it costs an attacker. Slow hashes are for secrets that people choose.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from sluice.errors import ConfigError
from sluice.reload import Reloaded

_PREFIX = "sk-sluice-"
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")
_SHORTEST = 32  # characters; a shorter secret could be guessed, so it is never accepted


@dataclass(frozen=True)
class ApiKey:
    """``max_concurrent`` None: no limit of its own. ``operator`` also opens metrics and the status page."""

    name: str
    digest: bytes
    max_concurrent: int | None = None
    operator: bool = False

    def line(self) -> str:
        """As it stands in the file."""
        limit = [] if self.max_concurrent is None else [f"max_concurrent={self.max_concurrent}"]
        role = ["operator"] if self.operator else []
        return " ".join([self.name, f"sha256:{self.digest.hex()}", *limit, *role])


def new_secret() -> str:
    """A key to hand out: 256 random bits in URL-safe letters."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


def checked_name(name: str) -> str:
    """Raises `ConfigError` for what could not stand in a line or a log field."""
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} is no name of a key",
            stage="keys",
            remedy="use up to 64 letters, digits and . _ @ -",
        )
    return name


def parse_keys(text: str, source: str) -> tuple[ApiKey, ...]:
    """Keys of a file's text. Raises `ConfigError` that names the line; the offending words are not repeated, for
    somebody may have pasted a key where its hash belongs.
    """
    keys: list[ApiKey] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            key = _key_of(words)
            if any(key.name == other.name for other in keys):
                raise ConfigError(f"the name {key.name} is there twice")
            if any(key.digest == other.digest for other in keys):
                raise ConfigError("the same key is there twice")
        except ConfigError as error:
            raise ConfigError(
                f"{source}, line {number}: {error.message}",
                stage="keys",
                remedy="a line is: name sha256:HEX [max_concurrent=N] [operator]; "
                "`sluice keys new NAME` prints one",
            ) from error
        keys.append(key)
    return tuple(keys)


class ApiKeys:
    """The keys of one file, read again when it changes. Raises `ConfigError` when it is no good at first."""

    def __init__(self, file: Path) -> None:
        self._keys = Reloaded("api keys", [file], lambda: _read(file))

    def find(self, secret: str) -> ApiKey | None:
        """The key of this secret. Takes as long whichever it is, and if none."""
        digest = digest_of(secret)
        found = None
        for key in self._keys.get():
            if hmac.compare_digest(key.digest, digest):
                found = key
        return found if len(secret) >= _SHORTEST else None


def _read(file: Path) -> tuple[ApiKey, ...]:
    try:
        return parse_keys(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read the API keys {file}: {error}", stage="keys") from error


def _key_of(words: list[str]) -> ApiKey:
    if not _NAME.fullmatch(words[0]):
        raise ConfigError("the first word is no name")
    if len(words) < 2 or (match := _HASH.fullmatch(words[1])) is None:
        raise ConfigError("the second word is not sha256: and 64 hex digits")
    limit, operator = None, False
    for word in words[2:]:
        name, _, value = word.partition("=")
        if name == "max_concurrent" and value.isdecimal() and int(value) > 0:
            limit = int(value)
        elif word == "operator":
            operator = True
        else:
            raise ConfigError("an option is neither max_concurrent=N (at least 1) nor operator")
    return ApiKey(words[0], bytes.fromhex(match[1]), limit, operator)
