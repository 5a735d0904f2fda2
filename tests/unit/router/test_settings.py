"""Settings of the router and the refusal of misspelt names."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from services.discovery.file import FileSource
from services.environment import refuse_unknown, split_address, split_addresses
from services.router.settings import PREFIX, RouterSettings, load_settings
from sluice.errors import ConfigError
from sluice.rpc.tls import PeerRole


def _load(monkeypatch: pytest.MonkeyPatch, **values: str) -> RouterSettings:
    environ = {PREFIX + name: value for name, value in values.items()}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    return load_settings(environ)


def test_comma_lists_and_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _load(monkeypatch, MODEL_DIR="models/some", DECODES="a:1, b:2", LISTEN="[::1]:0")
    assert settings.decodes == ("a:1", "b:2")
    assert settings.prefills == ()
    assert settings.served_name == "some"
    assert settings.model_dir == Path("models/some")


@pytest.mark.parametrize(
    "values",
    [
        {"MODEL_DIR": "m"},
        {"MODEL_DIR": "m", "DECODES": ""},
        {"MODEL_DIR": "m", "DECODES": "nohost"},
        {"MODEL_DIR": "m", "DECODES": "a:99999"},
        {"MODEL_DIR": "m", "DECODES": "a:1", "LISTEN": "8000"},
        {"MODEL_DIR": "m", "DECODES": "a:1", "RETRIES": "-1"},
        {"MODEL_DIR": "m", "DECODES": "a:1", "HTTP_TLS_CERT": "c"},
        {"MODEL_DIR": "m", "DECODES": "a:1", "TLS_CERT": "c", "TLS_KEY": "k"},
    ],
)
def test_bad_values_are_refused(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    with pytest.raises(ValidationError):
        _load(monkeypatch, **values)


def test_settings_are_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _load(monkeypatch, MODEL_DIR="m", DECODES="a:1")
    with pytest.raises(ValidationError):
        settings.retries = 5  # type: ignore[misc]


@pytest.mark.parametrize("name", ["SLUICE_ROUTER_DECODE", "SLUICE_ROUTR_DECODES", "SLUICE_X"])
def test_misspelt_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        refuse_unknown({name: "x"}, PREFIX, RouterSettings.model_fields)


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError) as caught:
        refuse_unknown({"SLUICE_ROUTER_DECODE": "x"}, PREFIX, RouterSettings.model_fields)
    assert caught.value.remedy == "did you mean SLUICE_ROUTER_DECODES?"


def test_other_roles_names_pass() -> None:
    environ = {"SLUICE_PREFILL_ANYTHING": "x", "SLUICE_DECODE_PEERS": "y", "PATH": "/"}
    refuse_unknown(environ, PREFIX, RouterSettings.model_fields)


def test_addresses() -> None:
    assert split_address("[::1]:80") == ("::1", 80)
    assert split_addresses(" a:1 ,, b:2,") == ("a:1", "b:2")
    for bad in ("a", "a:", ":1", "a:b", "a:70000"):
        with pytest.raises(ValueError, match="not host:port"):
            split_address(bad)


def test_empty_files_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chart that has no certificate may set the variable all the same."""
    files = dict.fromkeys(
        ("API_KEYS_FILE", "HTTP_TLS_CERT", "HTTP_TLS_KEY", "TLS_CERT", "TLS_KEY"), ""
    )
    settings = _load(monkeypatch, MODEL_DIR="m", DECODES="a:1", **files, TLS_CA="")
    assert settings.api_keys_file is None
    assert settings.http_tls_cert is None
    assert settings.tls(PeerRole.ROUTER) is None


def test_other_discoveries_need_no_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _load(monkeypatch, MODEL_DIR="m", DISCOVERY="file", DISCOVERY_FILE="pods.yaml")
    assert isinstance(settings.source(), FileSource)
    assert not settings.pairing().any_prefill, "a prefill that the file doesn't name is none"


def test_discovery_by_a_file_needs_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="discovery_file"):
        _load(monkeypatch, MODEL_DIR="m", DISCOVERY="file").source()


def test_static_prefills_close_the_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = _load(monkeypatch, MODEL_DIR="m", DECODES="a:1")
    assert settings.pairing().any_prefill
    settings = _load(monkeypatch, MODEL_DIR="m", DECODES="a:1", PREFILLS="b:1")
    assert not settings.pairing().any_prefill
