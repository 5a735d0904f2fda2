"""Settings of a prefill pod, read from ``SLUICE_PREFILL_*``."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from services.pod_settings import PodSettings


class PrefillSettings(PodSettings):
    model_config = SettingsConfigDict(env_prefix="SLUICE_PREFILL_", frozen=True)

    forget_peer_s: float = (
        30.0  # a decode pod silent this long is forgotten; it pairs again by itself
    )
