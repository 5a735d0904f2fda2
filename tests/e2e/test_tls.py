"""A real 1P1D and router that speak TLS: served, closed to others, rotated to a new CA without a restart."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import trustme

from sluice.errors import PeerLost, Untrusted, WrongRole
from sluice.rpc.channel import ChannelConfig
from sluice.rpc.client import DecodeClient, PodClient, PrefillClient
from sluice.rpc.messages import GenerateCall
from sluice.rpc.tls import PeerRole, Tls, TlsFiles
from sluice.types import AttemptId, RequestId, Sampling
from sluice.v1 import prefill_pb2
from tests.e2e.pods import Pod, eventually, free_port
from tests.unit.rpc.certificates import write_files

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.slow]
_ROLES = {role.value: role for role in PeerRole}
_BODY = {"prompt": "And it came to pass", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


class _Stack:
    """Three processes, each with certificate files of its own role; an operator's beside them."""

    def __init__(self, folder: Path, model_dir: Path) -> None:
        self._folder = folder
        self.health_port = free_port()
        model = {"model_dir": str(model_dir)}
        probes = {"health_listen": f"127.0.0.1:{self.health_port}"}
        self.prefill = self._pod("prefill", model | probes)
        self.decode = self._pod("decode", model | {"peers": self.prefill.address})
        self.router = self._pod("router", model | {"decodes": self.decode.address})
        self.pods = (self.prefill, self.decode, self.router)

    def _pod(self, role: str, settings: dict[str, str]) -> Pod:
        files = self.files(role)
        tls = {"tls_cert": files.cert, "tls_key": files.key, "tls_ca": files.ca}
        own = {name: str(file) for name, file in tls.items()}
        return Pod(role, settings | own, self._folder / f"{role}.log")

    def files(self, role: str) -> TlsFiles:
        folder = self._folder / role
        return TlsFiles(folder / "tls.crt", folder / "tls.key", folder / "ca.crt")

    def certify(self, ca: trustme.CA, trust: Sequence[trustme.CA]) -> None:
        for name, role in _ROLES.items():
            write_files(self._folder / name, ca, role.dns_name, trust=trust)

    def as_(self, role: PeerRole) -> ChannelConfig:
        return ChannelConfig(tls=Tls(self.files(role.value), role))

    async def ready(self, http: httpx.AsyncClient) -> None:
        async def look() -> bool:
            for pod in self.pods:
                assert pod.alive(), pod.log_tail()
            try:
                return (await http.get("/ready")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(look, 90.0, "router ready", every_s=0.2)


@asynccontextmanager
async def _running(folder: Path, model_dir: Path, ca: trustme.CA) -> AsyncIterator[_Stack]:
    stack = _Stack(folder, model_dir)
    stack.certify(ca, [ca])
    try:
        for pod in stack.pods:
            pod.start()
        yield stack
    finally:
        for pod in reversed(stack.pods):
            pod.kill()


async def _handshake(address: str, channel: ChannelConfig | None) -> None:
    async with PrefillClient(address, channel) as client:
        request = prefill_pb2.HandshakeRequest(epoch="evil")
        request.endpoints.add().metadata = b"evil"
        await client.handshake(request, 5.0)


async def _layout_show(address: str, *flags: str) -> tuple[int, str]:
    command = (sys.executable, "-m", "sluice.cli", "layout", "show", address, *flags)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    out, err = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, (out + err).decode()


@pytest.mark.asyncio
@pytest.mark.timeout(240)
async def test_a_stack_on_tls(tmp_path: Path, model_dir: Path) -> None:
    old, new = trustme.CA(), trustme.CA()
    async with _running(tmp_path, model_dir, old) as stack:
        url = f"http://{stack.router.address}"
        async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as http:
            await stack.ready(http)

            async def answer() -> str:
                response = await http.post("/v1/completions", json=_BODY)
                assert response.status_code == 200, response.text
                return str(response.json()["choices"][0]["text"])

            text = await answer()
            assert text

            # Others: told why, and neither pod has taken anything from them.
            async with DecodeClient(stack.decode.address, stack.as_(PeerRole.OPERATOR)) as client:
                peers = (await client.get_status(5.0)).peers
            with pytest.raises(PeerLost, match="may want TLS"):
                await _handshake(stack.prefill.address, None)
            for role in (PeerRole.ROUTER, PeerRole.OPERATOR, PeerRole.PREFILL):
                with pytest.raises(WrongRole, match="Handshake is for decode"):
                    await _handshake(stack.prefill.address, stack.as_(role))
            async with DecodeClient(stack.decode.address, stack.as_(PeerRole.OPERATOR)) as client:
                with pytest.raises(WrongRole, match="Generate is for router"):
                    async for _ in client.generate(_call(stack.prefill.address)):
                        pass
                assert (await client.get_status(5.0)).peers == peers
            async with PrefillClient(stack.prefill.address, stack.as_(PeerRole.OPERATOR)) as client:
                assert (await client.get_status(5.0)).paired == 1
            log = stack.prefill.log_file.read_text()
            assert "PEER_DID_NOT_RETURN_A_CERTIFICATE" in log or "WRONG_VERSION_NUMBER" in log
            assert "call_refused" in log
            assert "router.sluice at " in log

            # Probes, and an operator at the command line.
            async with PodClient(f"127.0.0.1:{stack.health_port}") as probe:
                assert await probe.healthy("sluice.v1.Prefill")
            files = stack.files("operator")
            flags = [
                f"--tls-{name}={file}"
                for name, file in (("cert", files.cert), ("key", files.key), ("ca", files.ca))
            ]
            code, out = await _layout_show(stack.decode.address, *flags)
            assert (code, "target.swa" in out) == (0, True), out

            # Another CA, step by step; then a restarted prefill proves that new connections use the new files.
            for issuer, trust in ((old, [old, new]), (new, [old, new]), (new, [new])):
                stack.certify(issuer, trust)
                assert await answer() == text
            stack.prefill.kill()
            stack.prefill.start()

            async def again() -> bool:
                return (await http.post("/v1/completions", json=_BODY)).status_code == 200

            await eventually(again, 60.0, "served by the restarted prefill", every_s=0.3)
            assert await answer() == text
            late = write_files(tmp_path / "late", old, "decode.sluice")
            with pytest.raises(Untrusted):
                await _handshake(
                    stack.prefill.address, ChannelConfig(tls=Tls(late, PeerRole.DECODE))
                )
            assert stack.decode.alive()
            assert stack.router.alive()


def _call(prefill: str) -> GenerateCall:
    return GenerateCall(RequestId("r"), AttemptId("a"), prefill, (1, 2, 3), Sampling(), 5.0)
