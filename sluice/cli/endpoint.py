"""Where a command finds the router: its URL, an API key, a CA to trust."""

from __future__ import annotations

import argparse
import os
import ssl
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from sluice.errors import ConfigError, PeerLost

_URL = "http://127.0.0.1:8000"
_KEY_VARIABLE = "SLUICE_API_KEY"


@dataclass(frozen=True)
class Endpoint:
    """``api_key`` never appears in what this prints as."""

    url: str
    api_key: str = field(default="", repr=False)
    ca: Path | None = None


def add_endpoint_arguments(
    parser: argparse.ArgumentParser,
    url: str | None = _URL,
    about: str = f"the router; {_URL} unless said",
) -> None:
    """``url`` None: without one the command does something else, which ``about`` says."""
    parser.add_argument("--url", default=url, help=about)
    parser.add_argument(
        "--api-key",
        help=f"{_KEY_VARIABLE} of the environment unless said, which other users of this machine can't see",
    )
    parser.add_argument("--ca", type=Path, metavar="PEM", help="trust this CA for HTTPS")


def endpoint_of(args: argparse.Namespace) -> Endpoint:
    """Raises `ConfigError` for what is no URL."""
    url = str(args.url).rstrip("/").removesuffix("/v1")
    if httpx.URL(url).scheme not in ("http", "https"):
        raise ConfigError(f"{args.url!r} is no http:// or https:// URL", stage="start")
    key = os.environ.get(_KEY_VARIABLE, "") if args.api_key is None else args.api_key
    return Endpoint(url, key, args.ca)


def http_client(endpoint: Endpoint, timeout_s: float) -> httpx.AsyncClient:
    """As many connections as are asked for; proxies of the environment are not used.

    Raises `ConfigError` for a CA that can't be read.
    """
    try:
        verify = ssl.create_default_context(cafile=endpoint.ca)
    except OSError as error:
        raise ConfigError(f"can't use the CA {endpoint.ca}: {error}", stage="start") from error
    headers = {"authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    return httpx.AsyncClient(
        base_url=endpoint.url,
        headers=headers,
        verify=verify,
        timeout=timeout_s,
        trust_env=False,
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=1000),
    )


async def served_model(client: httpx.AsyncClient) -> str:
    """Name of the first model served. Raises `PeerLost` when nobody answers, `ConfigError` for an answer of another
    kind.
    """
    try:
        response = await client.get("/v1/models")
    except httpx.TransportError as error:
        raise PeerLost(
            f"{client.base_url}: {error or type(error).__name__}",
            stage="start",
            remedy="is the router up? `sluice up` starts one",
        ) from error
    if response.status_code != 200:
        raise ConfigError(
            f"{client.base_url} answered {response.status_code}: {error_text(response)}",
            stage="start",
        )
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(
            f"{client.base_url} is no OpenAI-compatible server", stage="start"
        ) from error


def error_text(response: httpx.Response) -> str:
    """The message of an error in OpenAI's shape, else the start of the body."""
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]
