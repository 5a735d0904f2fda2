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
from sluice.rpc.status import abort
from sluice.telemetry.logging import bind, get_logger

_BOUND_FIELDS = ("request_id", "attempt_id")
_log = get_logger(__name__)


@dataclass(frozen=True)
class ServerConfig:
    """``listen`` is ``host:port``; port 0 takes a free one. ``drain_s`` bounds `RpcServer.stop`."""

    listen: str = "127.0.0.1:0"
    drain_s: float = 5.0
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
        self._server = aio.server(options=_options(config), interceptors=[ErrorInterceptor()])
        register(self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*services, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        self._host = config.listen.rpartition(":")[0]
        self._port = 0

    @property
    def address(self) -> str:
        """``host:port`` really bound; valid after `start`."""
        return f"{self._host}:{self._port}"

    @property
    def port(self) -> int:
        return self._port

    async def start(self) -> None:
        """Bind and serve. Raises `ConfigError` when the address is taken or not ours."""
        try:
            self._port = self._server.add_insecure_port(self._config.listen)
        except RuntimeError as error:
            raise ConfigError(
                f"can't listen on {self._config.listen}: {error}",
                stage="start",
                remedy="choose another port, or 0 for any free one",
            ) from error
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

    async def wait(self) -> None:
        """Until the server has stopped."""
        await self._server.wait_for_termination()


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
    """

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
        coders = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_unary(handler.unary_unary), **coders)
        if handler.stream_unary is not None:
            return grpc.stream_unary_rpc_method_handler(_unary(handler.stream_unary), **coders)
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(_stream(handler.unary_stream), **coders)
        if handler.stream_stream is not None:
            return grpc.stream_stream_rpc_method_handler(_stream(handler.stream_stream), **coders)
        return handler


def _unary(behaviour: Behaviour) -> Behaviour:
    async def call(request: Any, context: Any) -> Any:
        _bind_ids(request)
        try:
            return await behaviour(request, context)
        except aio.AbortError:
            raise
        except Exception as error:
            _log_untyped(error)
            await abort(context, error)

    return call


def _stream(behaviour: Behaviour) -> Behaviour:
    async def call(request: Any, context: Any) -> None:
        _bind_ids(request)
        try:
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
