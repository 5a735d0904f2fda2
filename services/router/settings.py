"""Settings of the router, from ``SLUICE_ROUTER_*`` environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from services.environment import refuse_unknown, split_address, split_addresses
from services.tls_settings import TlsSettings

PREFIX = "SLUICE_ROUTER_"
Addresses = Annotated[tuple[str, ...], NoDecode]


class RouterSettings(TlsSettings):
    """All the router needs to know. Times are seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, protected_namespaces=())

    model_dir: Path  # only its tokenizer, eos ids and chat template are read
    model_name: str = ""  # as clients call it; the folder's name when empty
    listen: str = "127.0.0.1:8000"
    decodes: Addresses = Field(min_length=1)
    prefills: Addresses = ()  # empty = every prefill that a decode pod has agreed with
    timeout_s: float = Field(default=120.0, gt=0)  # of a request that states none
    max_timeout_s: float = Field(default=600.0, gt=0)
    retries: int = Field(default=1, ge=0)
    max_prompts: int = Field(default=16, ge=1)  # answers to one body: prompts times n
    max_body_bytes: int = Field(default=16 << 20, ge=1)
    body_timeout_s: float = Field(default=30.0, gt=0)  # until a body has arrived
    refresh_s: float = Field(default=1.0, gt=0)  # how often decode pods are asked for their status
    drain_s: float = Field(default=5.0, ge=0)
    log_level: str = "info"

    api_keys_file: Path | None = None  # None: whoever reaches the port may ask (docs/security.md)
    http_tls_cert: Path | None = None  # HTTPS: a certificate with its chain, and its key
    http_tls_key: Path | None = None

    @field_validator("decodes", "prefills", mode="before")
    @classmethod
    def _comma_list(cls, value: Any) -> Any:
        return split_addresses(value) if isinstance(value, str) else value

    @field_validator("api_keys_file", "http_tls_cert", "http_tls_key", mode="before")
    @classmethod
    def _no_file_is_none(cls, value: Any) -> Any:
        return value or None

    @model_validator(mode="after")
    def _certificate_and_key(self) -> Self:
        if (self.http_tls_cert is None) != (self.http_tls_key is None):
            raise ValueError("http_tls_cert and http_tls_key belong together: set both or none")
        return self

    @field_validator("listen")
    @classmethod
    def _host_and_port(cls, value: str) -> str:
        split_address(value)
        return value

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_dir.resolve().name


def load_settings(environ: Mapping[str, str]) -> RouterSettings:
    """Read and check. Raises `ConfigError` on unknown names, pydantic's error on bad values."""
    refuse_unknown(environ, PREFIX, RouterSettings.model_fields)
    return RouterSettings()
