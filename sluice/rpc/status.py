"""Typed failures over gRPC: `SluiceError` to status plus trailing metadata, and back.

The status code and text are for stock clients; a serialised `sluice.v1.Failure` under
`FAILURE_KEY` carries the error itself, so that the caller raises the class that the callee raised.
"""

from __future__ import annotations

from typing import NoReturn, Protocol

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from sluice.errors import (
    Aborted,
    BadRequest,
    DeadlineExceeded,
    InternalError,
    LayoutRefused,
    NotReady,
    Overloaded,
    PeerLost,
    SluiceError,
    StaleEpoch,
    Untrusted,
    WrongRole,
    as_sluice_error,
)
from sluice.rpc.convert import failure_from_pb, failure_to_pb
from sluice.v1 import layout_pb2

FAILURE_KEY = "sluice-failure-bin"
# Header lists over 8 KiB are dropped by default, and the failure with them; text travels twice.
_MAX_MESSAGE_CHARS = 1500

# For a status that no Sluice servicer made: the network, gRPC itself, or a proxy in between.
_BARE_STATUS: dict[grpc.StatusCode, type[SluiceError]] = {
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Aborted,
    grpc.StatusCode.INVALID_ARGUMENT: BadRequest,
    grpc.StatusCode.FAILED_PRECONDITION: LayoutRefused,
    grpc.StatusCode.ABORTED: StaleEpoch,
    grpc.StatusCode.UNAUTHENTICATED: Untrusted,
    grpc.StatusCode.PERMISSION_DENIED: WrongRole,
}
# In gRPC's words for a connection that TLS refused: our side could not accept the server's certificate.
_OUR_REFUSAL = ("Tls handshake failed", "Hostname Verification")
# The server accepted the connection and closed it: so it refuses our certificate, or that we have none.
_HUNG_UP = ("failed to connect", "Socket closed")


class _Context(Protocol):
    async def abort(
        self, code: grpc.StatusCode, details: str, trailing_metadata: tuple[tuple[str, bytes], ...]
    ) -> NoReturn: ...


def status_of(error: SluiceError) -> grpc.StatusCode:
    return grpc.StatusCode[error.grpc_status]


def failure_metadata(error: SluiceError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata with ``error`` serialised; long texts are cut, the class never is."""
    failure = failure_to_pb(error)
    failure.message = _cut(failure.message)
    failure.remedy = _cut(failure.remedy)
    return ((FAILURE_KEY, failure.SerializeToString()),)


async def abort(context: _Context, error: Exception) -> NoReturn:
    """End the call with ``error``. Never returns."""
    typed = as_sluice_error(error)
    await context.abort(status_of(typed), _cut(str(typed)), failure_metadata(typed))
    raise AssertionError("abort returned")  # pragma: no cover


def error_of(error: grpc.RpcError, peer: str, tls: bool = False) -> SluiceError:
    """The typed error behind a failed call to ``peer`` (an address, for the message), made over ``tls`` or not."""
    if not isinstance(error, aio.AioRpcError):
        return InternalError(f"call to {peer} failed: {error}")
    for key, value in error.trailing_metadata() or ():
        if key == FAILURE_KEY and isinstance(value, bytes):
            try:
                return failure_from_pb(layout_pb2.Failure.FromString(value))
            except DecodeError:
                break
    return _bare_error(error, peer, tls)


def _bare_error(error: aio.AioRpcError, peer: str, tls: bool) -> SluiceError:
    code, details = error.code(), error.details() or "no details"
    message = f"{peer} answered {code.name}: {details}"
    if code is grpc.StatusCode.UNAVAILABLE:
        return _unavailable(message, details, tls)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return NotReady(message, remedy="check that this address is the right role and version")
    # gRPC uses RESOURCE_EXHAUSTED for its own size limits too, and those do not pass with time.
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        too_large = "larger than max" in details
        return InternalError(message) if too_large else Overloaded(message)
    return _BARE_STATUS.get(code, InternalError)(message)


def _unavailable(message: str, details: str, tls: bool) -> SluiceError:
    if any(word in details for word in _OUR_REFUSAL):
        return Untrusted(
            message,
            stage="tls",
            remedy="does the right role listen there, in date, signed by a CA in this side's tls_ca?",
        )
    if not all(word in details for word in _HUNG_UP):
        return PeerLost(message)
    if tls:
        return Untrusted(
            f"{message}: it hung up during the handshake",
            stage="tls",
            remedy="is this side's certificate signed by a CA in its tls_ca? its log has gRPC's reason",
        )
    return PeerLost(
        message, remedy="if the pod is up it may want TLS: set tls_cert, tls_key, tls_ca"
    )


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_MESSAGE_CHARS else text[: _MAX_MESSAGE_CHARS - 1] + "…"
