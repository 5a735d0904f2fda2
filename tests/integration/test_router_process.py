"""The router as a process: settings from the environment, bounded stop, clear refusals."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from services.router.__main__ import listen
from sluice.text.tokenizer import ModelTokenizer
from tests.integration.router_harness import ScriptedDecode, decode_server, hangs, says

_MODEL = Path(__file__).parents[2] / "models" / "tiny-dsv4"


@asynccontextmanager
async def router_process(**settings: str) -> AsyncIterator[Process]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SLUICE_")}
    chosen = {"MODEL_DIR": str(_MODEL), "LISTEN": "127.0.0.1:0", **settings}
    environ |= {f"SLUICE_ROUTER_{name}": value for name, value in chosen.items()}
    command = (sys.executable, "-m", "services.router")
    process = await asyncio.create_subprocess_exec(
        *command, env=environ, stdout=DEVNULL, stderr=PIPE
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def url_of(process: Process) -> str:
    """From its log; what it logs later stays in the pipe, which is large enough for a test."""
    assert process.stderr is not None
    async with asyncio.timeout(30):
        async for line in process.stderr:
            if match := re.search(r'"url": "([^"]+)"', line.decode()):
                return match.group(1)
    raise AssertionError("the router ended before it listened")


def test_connections_send_at_once() -> None:
    """Without the option each answer waits 40 ms: its body for the ACK of its headers."""
    with listen("127.0.0.1:0") as listener, socket.create_connection(listener.getsockname()[:2]):
        connection, _ = listener.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def refusal(process: Process) -> str:
    _, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode == 2
    assert b"Traceback" not in err
    return err.decode()


@pytest.mark.asyncio
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_stops_within_its_drain_time_and_cancels_what_is_left(
    number: signal.Signals,
) -> None:
    decode = ScriptedDecode([says("x"), hangs("some")])
    async with (
        decode_server(decode) as address,
        router_process(DECODES=address, DRAIN_S="1") as process,
    ):
        url = await url_of(process)
        body = {"prompt": "hi", "stream": True}
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=30) as http:
            assert (await http.post("/v1/completions", json=body)).status_code == 200
            async with http.stream("POST", "/v1/completions", json=body) as hanging:
                lines = hanging.aiter_lines()
                await anext(lines)
                decode.closed.clear()
                asked = time.monotonic()
                process.send_signal(number)
                assert await asyncio.wait_for(process.wait(), 15) == 0
                assert time.monotonic() - asked < 8.0
                await asyncio.wait_for(decode.closed.wait(), 2.0)
                with pytest.raises(httpx.TransportError):
                    async for _ in lines:
                        pass


def _folder(folder: Path, template: str) -> str:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_MODEL / name, folder / name)
    (folder / "chat_template.jinja").write_text(template)
    return str(folder)


@pytest.mark.asyncio
async def test_it_chats_with_the_template_of_its_folder(tmp_path: Path) -> None:
    folder = _folder(tmp_path, "{{ bos_token }}{{ messages[0].content }}")
    decode = ScriptedDecode([says("x")])
    async with (
        decode_server(decode) as address,
        router_process(DECODES=address, MODEL_DIR=folder) as process,
        httpx.AsyncClient(base_url=await url_of(process), trust_env=False, timeout=30) as http,
    ):
        turns = {"messages": [{"role": "user", "content": "hi"}]}
        assert (await http.post("/v1/chat/completions", json=turns)).status_code == 200
    assert decode.calls[0].prompt == ModelTokenizer.load(_MODEL).encode("hi")


@pytest.mark.asyncio
async def test_a_broken_template_is_refused(tmp_path: Path) -> None:
    async with router_process(DECODES="a:1", MODEL_DIR=_folder(tmp_path, "{% if %}")) as process:
        assert "chat_template.jinja, line 1" in await refusal(process)


@pytest.mark.asyncio
async def test_a_misspelt_variable_is_refused() -> None:
    async with router_process(DECODES="a:1", TIMEOUTS="3") as process:
        err = await refusal(process)
    assert "SLUICE_ROUTER_TIMEOUTS" in err
    assert "did you mean" in err


@pytest.mark.asyncio
async def test_a_taken_port_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        async with router_process(DECODES="a:1", LISTEN=address) as process:
            assert address in await refusal(process)


@pytest.mark.asyncio
async def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    async with router_process(DECODES="a:1", MODEL_DIR=str(tmp_path)) as process:
        assert "tokenizer.json is missing" in await refusal(process)


@pytest.mark.asyncio
async def test_a_draining_router_says_so_while_it_still_takes_requests() -> None:
    """Load balancers hear of it before connections are refused; streams end by themselves; exit 0."""
    decode = ScriptedDecode([says("x")])
    settings = {"DRAIN_NOTICE_S": "3", "DRAIN_S": "5"}
    async with (
        decode_server(decode) as address,
        router_process(DECODES=address, **settings) as process,
    ):
        async with httpx.AsyncClient(base_url=await url_of(process), trust_env=False) as http:
            assert (await http.get("/ready")).status_code == 200
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(5.0):
                while (await http.get("/ready")).status_code == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
            assert "shutting down" in (await http.get("/ready")).text
            assert (await http.post("/v1/completions", json={"prompt": "hi"})).status_code == 200
            assert await asyncio.wait_for(process.wait(), 15) == 0
