"""The gRPC server both pods stand on: health, reflection, typed errors, bounded drain."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, cast

import grpc
from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from sluice.errors import ConfigError, SluiceError
from sluice.rpc.callers import caller_of, check_caller
from sluice.rpc.status import abort
from sluice.rpc.tls import Tls, TlsMaterial
from sluice.telemetry.logging import bind, get_logger
from sluice.telemetry.traceparent import incoming

_BOUND_FIELDS = ("request_id", "attempt_id")
_log = get_logger(__name__)


@dataclass(frozen=True)
class ServerConfig:
    """``listen`` is ``host:port``; port 0 takes a free one. ``drain_s`` bounds `RpcServer.stop`.

    With ``tls`` every connection needs a certificate of its CA, and every call the role that `callers` asks for.
    ``health_listen`` adds a plain port that answers health and nothing else, for probes that have no certificate.
    """

    listen: str = "127.0.0.1:0"
    drain_s: float = 5.0
    tls: Tls | None = None
    health_listen: str = ""
    max_message_bytes: int = 64 << 20
    min_client_ping_s: float = 0.5  # clients ping every second or two; refuse only a flood


class RpcServer:
    """One aio server. ``register`` adds the servicers; ``services`` are their full names.

    Health ("grpc.health.v1") answers SERVING for ``""`` (the process is alive) from the start and
    NOT_SERVING for each of ``services`` and ``health_names`` until `set_serving` says otherwise.
    """

    def __init__(
        self,
        config: ServerConfig,
        register: Callable[[aio.Server], None],
        services: Sequence[str],
        health_names: Sequence[str] = (),
    ) -> None:
        self._config = config
        self._health = health.aio.HealthServicer()
        self._names = (*services, *health_names)
        self._server = aio.server(
            options=_options(config), interceptors=[ErrorInterceptor(config.tls is not None)]
        )
        self._probe_server: aio.Server | None = None
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._host = config.listen.rpartition(":")[0]
        self._port = 0
        self.health_port = 0

    @property
    def address(self) -> str:
        """``host:port`` really bound; valid after `start`."""
        return f"{self._host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError` when the address is taken or not ours."""
        self._port = _bind(self._server, self._config.listen, self._config.tls)
        if self._config.health_listen:
            self._probe_server = aio.server(options=_options(self._config))
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._probe_server)
            self.health_port = _bind(self._probe_server, self._config.health_listen, None)
            await self._probe_server.start()
        for name in self._names:
            await self.set_serving(name, False)
        await self._server.start()

    async def set_serving(self, name: str, serving: bool) -> None:
        """Health of one named service, as `grpc.health.v1` reports it."""
        answers = health_pb2.HealthCheckResponse
        await self._health.set(name, answers.SERVING if serving else answers.NOT_SERVING)

    async def stop(self) -> None:
        """Take no new calls, cancel running ones after ``drain_s``. Liveness stays green."""
        for name in self._names:
            await self.set_serving(name, False)
        await self._server.stop(self._config.drain_s)
        if self._probe_server is not None:
            await self._probe_server.stop(0)

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()


def _bind(server: aio.Server, listen: str, tls: Tls | None) -> int:
    """The port really bound. Raises `ConfigError`."""
    try:
        if tls is None:
            return server.add_insecure_port(listen)
        return server.add_secure_port(listen, server_credentials(tls))
    except RuntimeError as error:
        raise ConfigError(
            f"can't listen on {listen}: {error}",
            stage="start",
            remedy="choose another port, or 0 for any free one",
        ) from error


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Mutual TLS with the files as they are at each handshake."""
    given = tls.current()

    def configuration(material: TlsMaterial) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration(
            [(material.key, material.cert)], root_certificates=material.ca
        )

    def newest() -> grpc.ServerCertificateConfiguration | None:
        nonlocal given
        material = tls.current()
        if material is given:
            return None
        given = material
        return configuration(material)

    return grpc.dynamic_ssl_server_credentials(
        configuration(given),
        newest,  # type: ignore[arg-type]  # None means: no change; the stubs don't know
        require_client_authentication=True,
    )


def _options(config: ServerConfig) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", config.max_message_bytes),
        ("grpc.max_send_message_length", config.max_message_bytes),
        # Two pods on one port would share its connections silently.
        ("grpc.so_reuseport", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(config.min_client_ping_s * 1000)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(config.min_client_ping_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_ping_strikes", 0),
    ]


Behaviour = Callable[[Any, Any], Any]  # gRPC's own handler types are untyped at run time


class ErrorInterceptor(aio.ServerInterceptor):
    """Lets servicers simply raise: every error leaves the pod typed.

    Streaming handlers are driven here by ``context.write`` rather than handed to gRPC as
    generators, so that a cancelled call closes the servicer's generator at once and not when it is
    collected.

    With ``check_callers`` nothing of a servicer runs before the caller's role was checked.
    """

    def __init__(self, check_callers: bool = False) -> None:
        self._check_callers = check_callers

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method if self._check_callers else None
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                _unary(handler.unary_unary, method), **coders
            )
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(
                _unary(handler.stream_unary, method), **coders
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                _stream(handler.unary_stream, method), **coders
            )
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(
                _stream(handler.stream_stream, method), **coders
            )
        return handler


def _unary(behaviour: Behaviour, method: str | None) -> Behaviour:
    async def call(request: Any, context: Any) -> Any:
        _bind_ids(request)
        incoming(context.invocation_metadata() or ())
        try:
            _check(method, context)
            return await behaviour(request, context)
        except aio.AbortError:
            raise
        except Exception as error:
            _log_untyped(error)
            await abort(context, error)

    return call


def _stream(behaviour: Behaviour, method: str | None) -> Behaviour:
    async def call(request: Any, context: Any) -> None:
        _bind_ids(request)
        incoming(context.invocation_metadata() or ())
        try:
            _check(method, context)
            if not inspect.isasyncgenfunction(behaviour):
                await behaviour(request, context)
                return
            async with aclosing(cast("Any", behaviour(request, context))) as responses:
                async for response in cast("AsyncIterator[Any]", responses):
                    await _write(context, response)
        except aio.AbortError:
            raise
        except _ClientGone:
            return
        except Exception as error:
            _log_untyped(error)
            await abort(context, error)

    return call


def _check(method: str | None, context: Any) -> None:
    """``method`` None: this server asks nobody who they are."""
    if method is None:
        return
    try:
        check_caller(method, context.auth_context())
    except SluiceError as error:
        _log.warning("call_refused", caller=caller_of(context), error=str(error))
        raise


class _ClientGone(Exception):
    pass


async def _write(context: Any, response: Any) -> None:
    """A write can lose the race against the call's cancellation: gRPC's core refuses the batch, and
    nobody is left to be told."""
    try:
        await context.write(response)
    except aio.InternalError as error:
        raise _ClientGone from error


def _bind_ids(request: object) -> None:
    for name in _BOUND_FIELDS:
        if isinstance(value := getattr(request, name, None), str) and value:
            bind(**{name: value})


def _log_untyped(error: Exception) -> None:
    if not isinstance(error, SluiceError):
        _log.error("rpc_untyped_error", exc_info=error)
