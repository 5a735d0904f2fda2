"""Settings of discovery, the same for the router and for decode pods; each adds its own prefix."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

from pydantic_settings import BaseSettings

from services.discovery.registry import Source
from sluice.errors import ConfigError


class Discovery(Enum):
    STATIC = "static"
    FILE = "file"
    KUBERNETES = "kubernetes"


class DiscoverySettings(BaseSettings):
    """Which source, and what it needs."""

    discovery: Discovery = Discovery.STATIC
    discovery_file: Path | None = None  # a YAML or JSON list of pods, watched
    discovery_namespace: str = ""  # empty = the one this pod runs in
    # Of labels; add the release's instance.
    discovery_selector: str = "app.kubernetes.io/name=sluice"

    def dynamic_source(self) -> Source:
        """The file or the Kubernetes source. Raises `ConfigError` when its settings are incomplete."""
        if self.discovery is Discovery.FILE:
            from services.discovery.file import FileSource

            if self.discovery_file is None:
                raise ConfigError(
                    "discovery is 'file' but no discovery_file is set",
                    stage="start",
                    remedy="name a YAML or JSON list of pods",
                )
            return FileSource(self.discovery_file)
        # Imported late: half a second and 45 MiB that a static fleet doesn't need.
        from services.discovery.kube import KubernetesSource

        return KubernetesSource(self.discovery_namespace, self.discovery_selector)
