"""Errors keep their class over the wire, whatever the class."""

from __future__ import annotations

import grpc
import pytest
from grpc import aio

from sluice import errors
from sluice.errors import InternalError, Overloaded, PeerLost, SluiceError, as_sluice_error
from sluice.rpc.status import FAILURE_KEY, error_of, failure_metadata, status_of


def _all_errors(root: type[SluiceError]) -> list[type[SluiceError]]:
    found = [root]
    for child in root.__subclasses__():
        if child.__module__ == errors.__name__:
            found += _all_errors(child)
    return found


def _rpc_error(
    code: grpc.StatusCode, details: str = "", trailing: tuple[tuple[str, bytes], ...] = ()
) -> aio.AioRpcError:
    return aio.AioRpcError(code, aio.Metadata(), aio.Metadata(*trailing), details)


@pytest.mark.parametrize("kind", _all_errors(SluiceError))
def test_every_class_survives_the_trip(kind: type[SluiceError]) -> None:
    sent = kind("what", stage="where", remedy="how")
    got = error_of(_rpc_error(status_of(sent), "text", failure_metadata(sent)), "peer:1")
    assert type(got) is kind
    assert (got.message, got.stage, got.remedy) == ("what", "where", "how")
    assert got.retryable == kind.retryable


def test_long_texts_stay_under_grpcs_header_limit() -> None:
    sent = PeerLost("m" * 100_000, remedy="r" * 100_000)
    ((key, value),) = failure_metadata(sent)
    assert key == FAILURE_KEY
    assert len(value) < 4096
    got = error_of(_rpc_error(status_of(sent), "", ((key, value),)), "peer:1")
    assert type(got) is PeerLost


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("UNAVAILABLE", "PeerLost"),
        ("DEADLINE_EXCEEDED", "DeadlineExceeded"),
        ("CANCELLED", "Aborted"),
        ("UNIMPLEMENTED", "NotReady"),
        ("RESOURCE_EXHAUSTED", "Overloaded"),
        ("INVALID_ARGUMENT", "BadRequest"),
        ("UNKNOWN", "InternalError"),
        ("DATA_LOSS", "InternalError"),
    ],
)
def test_a_status_nobody_typed_gets_a_class_and_names_the_peer(code: str, name: str) -> None:
    got = error_of(_rpc_error(grpc.StatusCode[code], "why"), "peer:1")
    assert got.code == name
    assert "peer:1" in got.message
    assert "why" in got.message


def test_a_message_over_the_size_limit_is_not_overload() -> None:
    details = "CLIENT: Received message larger than max (5 vs. 4)"
    got = error_of(_rpc_error(grpc.StatusCode.RESOURCE_EXHAUSTED, details), "peer:1")
    assert type(got) is InternalError
    assert not got.retryable


def test_garbage_in_the_trailer_falls_back_to_the_status() -> None:
    trailing = ((FAILURE_KEY, b"\xff\xff\xff"),)
    got = error_of(_rpc_error(grpc.StatusCode.UNAVAILABLE, "", trailing), "peer:1")
    assert type(got) is PeerLost


def test_untyped_errors_become_internal() -> None:
    assert as_sluice_error(KeyError("x")).code == "InternalError"
    assert as_sluice_error(TimeoutError()).code == "DeadlineExceeded"
    full = Overloaded("full")
    assert as_sluice_error(full) is full
