"""The exec probe, as a pod's container runs it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from sluice.rpc.server import RpcServer, ServerConfig

SERVICE = "sluice.v1.Decode"


async def _probe(*words: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "sluice.rpc.probe", *words), stderr=asyncio.subprocess.PIPE
    )
    _, heard = await process.communicate()
    return process.returncode, heard.decode()


@pytest.mark.asyncio
async def test_it_tells_alive_from_ready_and_gone() -> None:
    server = RpcServer(ServerConfig(), lambda _: None, (SERVICE,))
    await server.start()
    try:
        assert await _probe(server.address) == (0, "")
        code, heard = await _probe(server.address, SERVICE)
        assert (code, heard) == (1, f"{server.address} '{SERVICE}' is not serving\n")
        await server.set_serving(SERVICE, True)
        assert await _probe(server.address, SERVICE) == (0, "")
    finally:
        await server.stop()
    code, heard = await _probe(server.address)
    assert code == 1
    assert "UNAVAILABLE" in heard
