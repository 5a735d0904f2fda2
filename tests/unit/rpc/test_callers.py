"""The table of callers: every method of the contract is in it, and what isn't is nobody's."""

from __future__ import annotations

import pytest

from sluice.errors import WrongRole
from sluice.rpc.callers import CALLERS, check_caller
from sluice.rpc.tls import PeerRole
from sluice.v1 import decode_pb2, prefill_pb2

_METHODS = {
    f"/{service.full_name}/{method.name}"
    for file in (prefill_pb2.DESCRIPTOR, decode_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
}


def _auth(*roles: PeerRole) -> dict[str, list[bytes]]:
    return {"peer_dns": [role.dns_name.encode() for role in roles]}


def test_every_method_has_a_line_and_every_line_a_method() -> None:
    assert set(CALLERS) == _METHODS


@pytest.mark.parametrize("method", sorted(_METHODS))
@pytest.mark.parametrize("role", PeerRole)
def test_only_the_listed_roles_pass(method: str, role: PeerRole) -> None:
    if role in CALLERS[method]:
        check_caller(method, _auth(role))
        return
    with pytest.raises(WrongRole, match=role.value) as caught:
        check_caller(method, _auth(role))
    assert all(allowed.value in caught.value.message for allowed in CALLERS[method])


def test_what_writes_memory_is_for_decode_and_what_generates_for_the_router() -> None:
    for name in ("Handshake", "Run", "Drain", "Ping"):
        assert CALLERS[f"/sluice.v1.Prefill/{name}"] == {PeerRole.DECODE}
    assert CALLERS["/sluice.v1.Decode/Generate"] == {PeerRole.ROUTER}


@pytest.mark.parametrize("auth", [{}, {"peer_dns": [b"somebody.example"]}])
def test_no_role_opens_nothing_but_health(auth: dict[str, list[bytes]]) -> None:
    for method in [*_METHODS, "/sluice.v1.Prefill/New", "/some.Other/Call"]:
        with pytest.raises(WrongRole, match="no role"):
            check_caller(method, auth)
    check_caller("/grpc.health.v1.Health/Check", auth)


def test_a_method_without_a_line_is_nobodys() -> None:
    with pytest.raises(WrongRole, match="nobody"):
        check_caller("/sluice.v1.Prefill/New", _auth(*PeerRole))
