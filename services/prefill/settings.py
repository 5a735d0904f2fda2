"""Settings of a prefill pod, read from ``SLUICE_PREFILL_*``."""

from __future__ import annotations

from dataclasses import replace

from pydantic_settings import SettingsConfigDict

from services.pod_settings import PodSettings
from sluice.config import EngineConfig


class PrefillSettings(PodSettings):
    model_config = SettingsConfigDict(env_prefix="SLUICE_PREFILL_", frozen=True)

    # A decode pod silent this long is forgotten; it pairs again by itself.
    forget_peer_s: float = 30.0
    prefix_cache_bytes: int = 0  # of state kept for prompts that begin alike; 0 = keep nothing
    prefix_cache_interval_tokens: int = 512  # depths at which windows and recurrent state are kept

    def engine(self) -> EngineConfig:
        return replace(
            super().engine(),
            prefix_bytes=self.prefix_cache_bytes,
            prefix_interval_tokens=self.prefix_cache_interval_tokens,
        )
