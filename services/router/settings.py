"""Settings of the router, from ``SLUICE_ROUTER_*`` environment variables."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, field_validator, model_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from services.discovery.registry import Source
from services.discovery.settings import Discovery, DiscoverySettings
from services.discovery.static import StaticSource
from services.environment import refuse_unknown, split_address, split_addresses
from services.router.breaker import BreakerTimes
from services.router.pairing import Pairing, PairingConfig
from services.router.policy import PolicyName, make_policy
from services.tls_settings import TlsSettings
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient
from sluice.rpc.tls import PeerRole
from sluice.text.reply.formats import ReasoningName, ToolFormatName

PREFIX = "SLUICE_ROUTER_"
Addresses = Annotated[tuple[str, ...], NoDecode]


class RouterSettings(TlsSettings, DiscoverySettings):
    """All the router needs to know. Times are seconds."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, protected_namespaces=())

    model_dir: Path  # only its tokenizer, eos ids and chat template are read
    model_name: str = ""  # as clients call it; the folder's name when empty
    tool_format: ToolFormatName = ToolFormatName.AUTO  # how the model writes tool calls
    reasoning: ReasoningName = ReasoningName.AUTO  # whether <think> blocks are reasoning
    listen: str = "127.0.0.1:8000"
    decodes: Addresses = ()  # of static discovery
    prefills: Addresses = ()  # of static discovery; empty = every prefill that a decode pod has agreed with
    policy: PolicyName = PolicyName.LEAST_LOAD
    prefix_block_tokens: int = Field(default=128, ge=1)  # of prefix affinity: the pods' page
    max_in_flight: int = Field(default=0, ge=0)  # attempts on a decode pod; 0 = what the pod says
    max_waiting: int = Field(default=256, ge=0)  # requests without a pair yet; more get 429
    queue_timeout_s: float = Field(default=30.0, gt=0)  # of one of them
    pair_wait_s: float = Field(default=5.0, ge=0)  # while no pair is usable, before they get 503
    breaker_failures: int = Field(default=3, ge=1)  # in a row, of one pair
    breaker_cool_s: float = Field(default=1.0, gt=0)  # doubles with each failed probe
    breaker_max_cool_s: float = Field(default=30.0, gt=0)
    timeout_s: float = Field(default=120.0, gt=0)  # of a request that states none
    max_timeout_s: float = Field(default=600.0, gt=0)
    retries: int = Field(default=1, ge=0)
    max_prompts: int = Field(default=16, ge=1)  # answers to one body: prompts times n
    max_body_bytes: int = Field(default=16 << 20, ge=1)
    body_timeout_s: float = Field(default=30.0, gt=0)  # until a body has arrived
    refresh_s: float = Field(default=1.0, gt=0)  # how often decode pods are asked for their status
    drain_notice_s: float = Field(default=0.0, ge=0)  # /ready says no, and requests are still taken
    drain_s: float = Field(default=5.0, ge=0)  # then, for open requests to end
    log_level: str = "info"
    otlp_endpoint: str = ""  # http://host:port of an OpenTelemetry collector; empty = no tracing

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

    @model_validator(mode="after")
    def _has_pods(self) -> Self:
        if self.discovery is Discovery.STATIC and not self.decodes:
            raise ValueError("decodes is empty: name decode pods, or choose another discovery")
        return self

    def source(self) -> Source:
        """Where this router learns of its pods. Raises `ConfigError`."""
        if self.discovery is Discovery.STATIC:
            return StaticSource(prefills=self.prefills, decodes=self.decodes)
        return self.dynamic_source()

    def pairing(self) -> PairingConfig:
        return PairingConfig(
            refresh_s=self.refresh_s,
            max_in_flight=self.max_in_flight,
            max_waiting=self.max_waiting,
            patience_s=self.queue_timeout_s,
            pair_wait_s=self.pair_wait_s,
            any_prefill=self.discovery is Discovery.STATIC and not self.prefills,
            breaker=BreakerTimes(
                self.breaker_failures, self.breaker_cool_s, self.breaker_max_cool_s
            ),
        )

    @property
    def served_name(self) -> str:
        return self.model_name or self.model_dir.resolve().name


def make_pairing(settings: RouterSettings) -> Pairing:
    """The pairing of these settings, not started. Raises `ConfigError`."""
    policy = make_policy(settings.policy, settings.prefix_block_tokens)
    channel = ChannelConfig(tls=settings.tls(PeerRole.ROUTER))
    return Pairing(
        settings.source(),
        policy,
        settings.pairing(),
        lambda address: DecodeClient(address, channel),
    )


def load_settings(environ: Mapping[str, str]) -> RouterSettings:
    """Read and check. Raises `ConfigError` on unknown names, pydantic's error on bad values."""
    refuse_unknown(environ, PREFIX, RouterSettings.model_fields)
    return RouterSettings()
