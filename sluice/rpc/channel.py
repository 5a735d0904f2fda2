"""One gRPC channel to one address; with TLS it is made anew when the certificate files changed."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from typing import Any

import grpc
from grpc import aio

from sluice.rpc.tls import PeerRole, Tls, TlsMaterial


@dataclass(frozen=True)
class ChannelConfig:
    """A silent peer of an open call shows after ``keepalive_s + keepalive_timeout_s``. ``tls`` None: plain text."""

    keepalive_s: float = 1.0
    keepalive_timeout_s: float = 1.0
    connect_timeout_s: float = 2.0
    max_reconnect_s: float = 1.0
    max_message_bytes: int = 64 << 20
    tls: Tls | None = None


def channel_options(config: ChannelConfig) -> list[tuple[str, int | str]]:
    return [
        ("grpc.keepalive_time_ms", int(config.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        # The ping's own time-out (60 s unless told) is what ends a call to a silent peer, and a
        # bandwidth probe in flight would hold the next ping back.
        ("grpc.http2.ping_timeout_ms", int(config.keepalive_timeout_s * 1000)),
        ("grpc.http2.bdp_probe", 0),
        ("grpc.keepalive_permit_without_calls", 0),  # idle pods stay idle
        ("grpc.http2.max_pings_without_data", 0),  # a long prefill sends nothing for a while
        ("grpc.initial_reconnect_backoff_ms", 100),
        # Not a back-off: how long one attempt to connect may take, TLS and all.
        ("grpc.min_reconnect_backoff_ms", int(config.connect_timeout_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(config.max_reconnect_s * 1000)),
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        ("grpc.use_local_subchannel_pool", 1),  # a new client never inherits another's back-off
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 0),  # a retry is a new attempt, and ours to make
    ]


class PodChannel:
    """Connects on the first call. After a change of certificates new calls go over a new channel, and the old one is
    closed when its last call has ended.
    """

    def __init__(self, address: str, config: ChannelConfig, server: PeerRole | None) -> None:
        self._address = address
        self._config = config
        self._server = server
        self._material = config.tls.current() if config.tls else None
        self._channel = self._open()
        self._calls: Counter[aio.Channel] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def get(self) -> aio.Channel:
        """The channel for a call that starts now; `keep` the call in the same step of the loop."""
        if self._config.tls is not None:
            material = self._config.tls.current()
            if material is not self._material:
                self._replace(material)
        return self._channel

    def keep(self, call: Any) -> None:
        """Count a call just started, so that its channel outlives it."""
        channel = self._channel
        self._calls[channel] += 1
        call.add_done_callback(lambda _: self._ended(channel))

    async def close(self) -> None:
        """Cancels what is open."""
        channels = {self._channel, *self._calls}
        self._calls.clear()  # a call that ends from now on retires nothing
        for channel in channels:
            await channel.close()
        await asyncio.gather(*self._closing)

    def _replace(self, material: TlsMaterial) -> None:
        old = self._channel
        self._material = material
        self._channel = self._open()
        if not self._calls[old]:
            self._retire(old)

    def _ended(self, channel: aio.Channel) -> None:
        self._calls[channel] -= 1
        if not self._calls[channel] and channel is not self._channel:
            self._retire(channel)

    def _retire(self, channel: aio.Channel) -> None:
        self._calls.pop(channel, None)
        task = asyncio.get_running_loop().create_task(channel.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _open(self) -> aio.Channel:
        options = channel_options(self._config)
        if self._material is None:
            return aio.insecure_channel(self._address, options=options)
        credentials = grpc.ssl_channel_credentials(
            root_certificates=self._material.ca,
            private_key=self._material.key,
            certificate_chain=self._material.cert,
        )
        if self._server is not None:  # pods are dialled by address; their certificates have roles
            options.append(("grpc.ssl_target_name_override", self._server.dns_name))
        return aio.secure_channel(self._address, credentials, options=options)
