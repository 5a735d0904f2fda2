"""Where a command finds the router, and how it keeps the key to itself."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from sluice.cli.endpoint import Endpoint, add_endpoint_arguments, endpoint_of, http_client
from sluice.errors import ConfigError


def _of(*words: str) -> Endpoint:
    parser = argparse.ArgumentParser()
    add_endpoint_arguments(parser)
    return endpoint_of(parser.parse_args(words))


def test_the_key_comes_from_the_environment_and_is_never_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLUICE_API_KEY", "sk-secret")
    endpoint = _of("--url", "https://r:1/v1/")
    assert (endpoint.url, endpoint.api_key) == ("https://r:1", "sk-secret")
    assert "sk-secret" not in repr(endpoint)
    assert _of("--api-key", "other").api_key == "other"
    assert http_client(endpoint, 1.0).headers["authorization"] == "Bearer sk-secret"


def test_no_key_no_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLUICE_API_KEY", raising=False)
    assert "authorization" not in http_client(_of(), 1.0).headers


def test_what_is_no_url_or_ca_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no http"):
        _of("--url", "localhost:8000")
    with pytest.raises(ConfigError, match="CA"):
        http_client(_of("--ca", str(tmp_path / "none")), 1.0)
