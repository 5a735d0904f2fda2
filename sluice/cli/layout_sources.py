"""Where ``sluice layout`` gets layouts from: saved files, and running pods of either role."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from sluice.errors import ConfigError, NotReady, Untrusted
from sluice.layout.encoding import decode
from sluice.layout.layout import Layout
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient, PrefillClient


def read_layouts(
    sources: Sequence[str], timeout_s: float, channel: ChannelConfig | None = None
) -> tuple[Layout, ...]:
    """One layout a source. ``timeout_s`` bounds each call to a running pod, made over ``channel``.

    Raises ``ConfigError`` for what is neither a readable file nor an address, ``PeerLost`` or
    ``DeadlineExceeded`` when nobody answers there.
    """
    return tuple(_read(source, timeout_s, channel) for source in sources)


def _read(source: str, timeout_s: float, channel: ChannelConfig | None) -> Layout:
    path = Path(source)
    if path.is_file():
        try:
            return decode(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise ConfigError(f"{source} is not a layout file: {error}") from error
    host, _, port = source.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{source!r} is neither a file nor host:port",
            remedy="write a file with: sluice layout show POD --save FILE",
        )
    return asyncio.run(_ask(source, timeout_s, channel))


async def _ask(address: str, timeout_s: float, channel: ChannelConfig | None) -> Layout:
    """Both roles answer ``GetLayout``, each under its own service name and with its own certificate."""
    async with PrefillClient(address, channel) as prefill:
        try:
            return (await prefill.get_layout(timeout_s)).layout
        except (NotReady, Untrusted):  # not a prefill pod: gRPC or its certificate says so at once
            pass
    async with DecodeClient(address, channel) as decode_pod:
        return (await decode_pod.get_layout(timeout_s)).layout
