"""Who may call what, when pods speak TLS: one line a method, and nothing that is not listed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sluice.errors import WrongRole
from sluice.rpc.tls import PeerRole, roles_of

_DECODE = frozenset({PeerRole.DECODE})
_ROUTER = frozenset({PeerRole.ROUTER})
_WATCHERS = frozenset({PeerRole.ROUTER, PeerRole.OPERATOR})
CALLERS: Mapping[str, frozenset[PeerRole]] = {
    # Who shakes hands hands over NIXL metadata, and who runs an attempt has memory written: only decode pods.
    "/sluice.v1.Prefill/Handshake": _DECODE,
    "/sluice.v1.Prefill/Run": _DECODE,
    "/sluice.v1.Prefill/Drain": _DECODE,
    "/sluice.v1.Prefill/Ping": _DECODE,
    "/sluice.v1.Prefill/GetLayout": _WATCHERS | _DECODE,
    "/sluice.v1.Prefill/GetStatus": _WATCHERS | _DECODE,
    "/sluice.v1.Decode/Generate": _ROUTER,
    "/sluice.v1.Decode/Pair": _WATCHERS,
    "/sluice.v1.Decode/GetLayout": _WATCHERS,
    "/sluice.v1.Decode/GetStatus": _WATCHERS,
}
# Health and reflection say nothing about anybody's request: any certificate that the CA signed will do.
_ANYBODY = ("/grpc.health.v1.Health/", "/grpc.reflection.")


def check_caller(method: str, auth: Mapping[str, Iterable[bytes]]) -> None:
    """``auth`` is gRPC's auth context of the call. Raises `WrongRole`; a method without a line is nobody's."""
    if method.startswith(_ANYBODY):
        return
    allowed = CALLERS.get(method, frozenset())
    roles = roles_of(auth.get("peer_dns", ()))
    if not roles & allowed:
        has = _names(roles) or "no role"
        wants = _names(allowed) or "nobody's"
        raise WrongRole(
            f"{method} is for {wants}; this certificate speaks for {has}",
            stage="tls",
            remedy="give the caller a certificate with the DNS name of one of these roles, such as decode.sluice",
        )


def caller_of(context: Any) -> str:
    """Names in the caller's certificate and where it called from, for the log."""
    names = b",".join(context.auth_context().get("peer_dns", ())).decode(errors="replace")
    return f"{names or 'no name'} at {context.peer()}"


def _names(roles: Iterable[PeerRole]) -> str:
    return " or ".join(sorted(role.value for role in roles))
