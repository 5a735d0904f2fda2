"""Settings of a decode pod, read from ``SLUICE_DECODE_*``."""

from __future__ import annotations

from dataclasses import replace

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from services.discovery.registry import Source
from services.discovery.settings import Discovery, DiscoverySettings
from services.discovery.static import StaticSource
from services.environment import split_addresses
from services.pod_settings import PodSettings
from sluice.config import EngineConfig


class DecodeSettings(PodSettings, DiscoverySettings):
    model_config = SettingsConfigDict(env_prefix="SLUICE_DECODE_", frozen=True)

    peers: str = ""  # comma list of prefill addresses, of static discovery
    # Agree with a pod without a draft; the draft window is then invalid.
    allow_missing_draft: bool = False
    backup_bytes: int = Field(default=8 << 30, ge=0)  # host memory for requests taken off
    verify_digests: bool = True  # compare a digest of every component before a request is adopted
    max_quarantined_share: float = 0.5  # of any pool; past it the pod says not ready
    canary_every_s: float = Field(default=60.0, gt=0)  # each moves one short prompt's state
    # What the canary's largest component must reach on the wire, or the pair turns red; 0 = no floor.
    canary_floor_bytes_s: float = Field(default=0.0, ge=0)
    # Mean tokens a verify step below which a draft is of no use; 0 = no alarm.
    acceptance_alarm_tokens: float = 1.1

    def engine(self) -> EngineConfig:
        return replace(super().engine(), backup_bytes=self.backup_bytes)

    def source(self) -> Source:
        """Where this pod learns of its prefill peers. Raises `ConfigError`."""
        if self.discovery is Discovery.STATIC:
            return StaticSource(prefills=self.peer_addresses())
        return self.dynamic_source()

    def peer_addresses(self) -> tuple[str, ...]:
        """Raises ValueError when one of them is not ``host:port``."""
        return split_addresses(self.peers)
