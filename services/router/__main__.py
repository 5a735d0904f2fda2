"""``python -m services.router``: settings, then serve until told to stop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from contextlib import AbstractContextManager, nullcontext

import uvicorn
from pydantic import ValidationError

from services.environment import split_address
from services.router.app import create_app
from services.router.https import https_context
from services.router.lease import PairSource
from services.router.settings import RouterSettings, load_settings, make_pairing
from services.tracing import open_tracing
from sluice.errors import ConfigError, SluiceError
from sluice.telemetry.logging import configure, get_logger
from sluice.telemetry.tracing import Tracing
from sluice.text.chat import ChatTemplate
from sluice.text.tokenizer import ModelTokenizer

_KEEP_ALIVE_S = 75  # longer than what clients and load balancers keep idle connections for
_log = get_logger(__name__)


def main() -> int:
    try:
        settings = load_settings(os.environ)
        configure("router", settings.log_level)
        asyncio.run(serve(settings))
    except (SluiceError, ValidationError, ValueError) as error:
        print(f"router: {error}", file=sys.stderr)
        return 2
    return 0


async def serve(settings: RouterSettings) -> None:
    """Run until SIGTERM or SIGINT, then drain: /ready says no, after ``drain_notice_s`` nothing new is
    taken, and open requests get ``drain_s``.
    """
    async with open_tracing("router", settings.otlp_endpoint) as tracing:
        await _serve(settings, tracing)


async def _serve(settings: RouterSettings, tracing: Tracing) -> None:
    tokenizer = ModelTokenizer.load(settings.model_dir)
    pairing = make_pairing(settings)
    config = uvicorn.Config(
        create_app(settings, tokenizer, pairing, ChatTemplate.load(settings.model_dir), tracing),
        log_config=None,
        access_log=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(settings.drain_s)),
    )
    listener = listen(settings.listen)
    host, port = listener.getsockname()[:2]
    scheme = "http"
    if settings.http_tls_cert is not None and settings.http_tls_key is not None:
        scheme = "https"
        config.load()
        config.ssl = https_context(settings.http_tls_cert, settings.http_tls_key)
    _log.info("router_listening", url=f"{scheme}://{host}:{port}", model=settings.served_name)
    server = _Server(config)
    stop = _Stop(server, pairing, settings.drain_notice_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.on_signal, number)
    with listener:
        await server.serve(sockets=[listener])


class _Stop:
    """The first signal starts the drain; a second one skips the notice, a third one what is open."""

    def __init__(self, server: uvicorn.Server, pairing: PairSource, notice_s: float) -> None:
        self._server = server
        self._pairing = pairing
        self._notice_s = notice_s

    def on_signal(self, number: int) -> None:
        first = not self._pairing.draining
        self._pairing.draining = True
        if first and self._notice_s:
            _log.info("router_draining", notice_s=self._notice_s)
            loop = asyncio.get_running_loop()
            loop.call_later(self._notice_s, self._close, number)
        else:
            self._server.handle_exit(number, None)

    def _close(self, number: int) -> None:
        if not self._server.should_exit:
            self._server.handle_exit(number, None)


class _Server(uvicorn.Server):
    """Uvicorn's own signal handling raises the signal again after a clean stop; we exit with 0.

    The first signal drains, a second SIGINT leaves at once (`uvicorn.Server.handle_exit`).
    """

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


def listen(address: str) -> socket.socket:
    """Bound before anything else starts, so that a taken port fails at once.

    Connections take TCP_NODELAY from it: asyncio sets the option on sockets it makes itself only, and without it
    the kernel keeps an answer's body back for the 40 ms that the client delays its ACK of the headers.
    """
    host, port = split_address(address)
    try:
        listener = socket.create_server((host, port), family=_family(host), backlog=1024)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {address}: {error}", stage="start", remedy="choose another port"
        ) from error
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


if __name__ == "__main__":
    sys.exit(main())
