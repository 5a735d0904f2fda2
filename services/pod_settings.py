"""Settings that prefill and decode pods share; each service adds its own prefix and what only it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from services.tls_settings import TlsSettings
from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.transfer.faults import Faults


class PodSettings(TlsSettings):
    """Read once at start from ``SLUICE_<ROLE>_*`` and handed down as frozen configs."""

    model_config = SettingsConfigDict(frozen=True)

    model_dir: Path
    listen: str = "127.0.0.1:0"
    otlp_endpoint: str = ""  # http://host:port of an OpenTelemetry collector; empty = no tracing
    metrics_listen: str = ""  # host:port of GET /metrics; port 0 takes a free one, empty = off
    advertise: str = ""  # what other pods call; empty = listen. sluice preflight looks at it
    health_listen: str = ""  # a plain port for probes, health only; empty = off (docs/security.md)
    device: str = "cpu"
    dtype: str = "float32"

    pool_mode: PoolMode = PoolMode.PAGED
    page_tokens: int = 128
    state_bytes: int = 0  # of each rank: as many pages as fit, whatever num_pages says; 0 = off
    num_pages: int = 1024
    num_window_pages: int = 256
    num_slots: int = 64
    kv_dtype: str = "float32"
    debug_fill: str | None = None  # "nan" or "pattern": what a new request finds in its rows

    tp: int = Field(default=1, ge=1)  # ranks (processes) that share the model: tensor parallelism
    dcp: int = Field(default=1, ge=1)  # of these, how many share a latent history; decode pods only
    # Compute all their queries on each, instead of gathering them.
    dcp_replicate_q_proj: bool = False

    spec_steps: int | None = None  # as the model's draft was made for; 0 = no speculation
    max_batch_tokens: int = 512
    max_running: int = 32
    max_queue: int = 256
    max_model_tokens: int = 4096
    promised_output: float = 1.0  # below 1: admit more, retract under pressure (see EngineConfig)

    drain_s: float = 5.0
    log_level: str = "info"

    fault_dir: Path | None = None  # tests only; see sluice/transfer/faults.py
    fault_withhold: str = ""  # tests only: comma list of component names that are silently not sent

    @model_validator(mode="after")
    def _model_dir_exists(self) -> Self:
        if not (self.model_dir / "config.json").is_file():
            raise ValueError(f"model_dir {self.model_dir} has no config.json")
        return self

    @model_validator(mode="after")
    def _ranks_divide(self) -> Self:
        if self.tp % self.dcp:
            raise ValueError(f"dcp {self.dcp} does not divide tp {self.tp}")
        return self

    def pool(self) -> PoolConfig:
        return PoolConfig(
            mode=self.pool_mode,
            page_tokens=self.page_tokens,
            num_pages=self.num_pages,
            budget_bytes=self.state_bytes,
            num_window_pages=self.num_window_pages,
            num_slots=self.num_slots,
            kv_dtype=self.kv_dtype,
            device=self.device,
            fill=self.debug_fill,
        )

    def spec(self) -> SpecConfig | None:
        return None if self.spec_steps is None else SpecConfig(steps=self.spec_steps)

    def engine(self) -> EngineConfig:
        return EngineConfig(
            max_batch_tokens=self.max_batch_tokens,
            max_running=self.max_running,
            max_queue=self.max_queue,
            max_model_tokens=self.max_model_tokens,
            promised_output=self.promised_output,
        )

    def faults(self) -> Faults:
        names = frozenset(name for name in self.fault_withhold.split(",") if name)
        return Faults(self.fault_dir, names)
