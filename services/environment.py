"""What the three services share about their environment: no misspelt names, well-formed addresses."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches

from sluice.errors import ConfigError

_PREFIX = "SLUICE_"
_ROLES = ("SLUICE_PREFILL_", "SLUICE_DECODE_", "SLUICE_ROUTER_")


def refuse_unknown(environ: Mapping[str, str], prefix: str, fields: Collection[str]) -> None:
    """Raise `ConfigError` for a ``SLUICE_`` name that means nothing to the service with ``prefix``.

    pydantic-settings ignores misspelt variables even with ``extra="forbid"``; a pod that silently
    runs with a default is worse than one that doesn't start. Names of the other roles pass.
    """
    known = {prefix + field.upper() for field in fields}
    others = tuple(role for role in _ROLES if role != prefix)
    unknown = sorted(
        name
        for name in environ
        if name.startswith(_PREFIX) and name not in known and not name.startswith(others)
    )
    if unknown:
        near = get_close_matches(unknown[0], sorted(known), n=1)
        remedy = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(known))}"
        names = ", ".join(unknown)
        raise ConfigError(f"unknown environment variable {names}", stage="start", remedy=remedy)


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` in two. Raises ValueError; port 0 is allowed."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return host.strip("[]"), int(port)


def split_addresses(text: str) -> tuple[str, ...]:
    """A comma list of ``host:port``; blanks around commas are dropped. Raises ValueError."""
    addresses = tuple(part.strip() for part in text.split(",") if part.strip())
    for address in addresses:
        split_address(address)
    return addresses
