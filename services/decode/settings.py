"""Settings of a decode pod, read from ``SLUICE_DECODE_*``."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from services.discovery.registry import Source
from services.discovery.settings import Discovery, DiscoverySettings
from services.discovery.static import StaticSource
from services.environment import split_addresses
from services.pod_settings import PodSettings


class DecodeSettings(PodSettings, DiscoverySettings):
    model_config = SettingsConfigDict(env_prefix="SLUICE_DECODE_", frozen=True)

    peers: str = ""  # comma list of prefill addresses, of static discovery
    allow_missing_draft: bool = (
        False  # agree with a pod without a draft; the draft window is then invalid
    )
    verify_digests: bool = True  # compare a digest of every component before a request is adopted
    max_quarantined_share: float = 0.5  # of any pool; past it the pod says not ready

    def source(self) -> Source:
        """Where this pod learns of its prefill peers. Raises `ConfigError`."""
        if self.discovery is Discovery.STATIC:
            return StaticSource(prefills=self.peer_addresses())
        return self.dynamic_source()

    def peer_addresses(self) -> tuple[str, ...]:
        """Raises ValueError when one of them is not ``host:port``."""
        return split_addresses(self.peers)
