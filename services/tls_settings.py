"""Settings of mutual TLS, the same for every service: three files, all or none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

from pydantic import field_validator, model_validator
from pydantic_settings import BaseSettings

from sluice.rpc.tls import PeerRole, Tls, tls_files
from sluice.telemetry.logging import get_logger

_log = get_logger(__name__)


class TlsSettings(BaseSettings):
    """PEM files of gRPC between the services; they may be replaced while the process runs (docs/security.md)."""

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None

    @field_validator("tls_cert", "tls_key", "tls_ca", mode="before")
    @classmethod
    def _empty_is_none(cls, value: Any) -> Any:
        return value or None

    @model_validator(mode="after")
    def _all_or_none(self) -> Self:
        tls_files(self.tls_cert, self.tls_key, self.tls_ca)
        return self

    def tls(self, role: PeerRole) -> Tls | None:
        """None: plain text. Raises `ConfigError` when the files can't serve ``role``."""
        files = tls_files(self.tls_cert, self.tls_key, self.tls_ca)
        if files is None:
            return None
        tls = Tls(files, role)
        _log.info("tls_on", tls_role=role.value, not_after=tls.current().not_after)
        return tls
