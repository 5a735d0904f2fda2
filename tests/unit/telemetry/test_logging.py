"""Logs: JSON lines, bound fields, library logs through the same handler."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from sluice.telemetry.logging import bind, configure, get_logger


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where logs go; logging is as it was afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield io.StringIO()
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_with_role_and_fields(stream: io.StringIO) -> None:
    configure("decode", stream=stream)
    get_logger("some.module").info("peer_agreed", peer="p:1")
    (line,) = _lines(stream)
    assert line["event"] == "peer_agreed"
    assert (line["role"], line["peer"], line["level"]) == ("decode", "p:1", "info")
    assert line["logger"] == "some.module"
    assert "timestamp" in line


def test_library_logs_take_the_same_way(stream: io.StringIO) -> None:
    configure("decode", stream=stream)
    logging.getLogger("grpc").warning("from %s", "grpc")
    (line,) = _lines(stream)
    assert (line["event"], line["role"]) == ("from grpc", "decode")


def test_level(stream: io.StringIO) -> None:
    configure("decode", "warning", stream=stream)
    get_logger("m").info("quiet")
    get_logger("m").warning("loud")
    assert [line["event"] for line in _lines(stream)] == ["loud"]
    with pytest.raises(ValueError, match="verbose"):
        configure("decode", "verbose", stream=stream)


def test_exceptions_are_one_json_line(stream: io.StringIO) -> None:
    configure("decode", stream=stream)
    get_logger("m").error("broke", exc_info=KeyError("why"))
    (line,) = _lines(stream)
    assert "KeyError" in str(line["exception"])


def test_console_is_for_people(stream: io.StringIO) -> None:
    configure("decode", stream=stream, as_json=False)
    get_logger("m").info("peer_agreed")
    assert "peer_agreed" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_bound_ids_stay_in_their_task(stream: io.StringIO) -> None:
    configure("decode", stream=stream)

    async def request(name: str) -> None:
        bind(request_id=name)
        await asyncio.sleep(0)
        get_logger("m").info("step")

    async def both() -> None:
        await asyncio.gather(asyncio.create_task(request("a")), asyncio.create_task(request("b")))
        get_logger("m").info("outside")

    asyncio.run(both())
    assert [line.get("request_id") for line in _lines(stream)] == ["a", "b", None]
