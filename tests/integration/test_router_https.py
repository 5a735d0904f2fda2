"""The router process over HTTPS with API keys, as the openai client sees it; certificates and keys change under it."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from pathlib import Path

import httpx
import openai
import pytest
import trustme

from sluice.apikeys import ApiKey, digest_of, new_secret
from tests.integration.router_harness import ScriptedDecode, decode_server, says
from tests.integration.test_router_process import router_process, url_of
from tests.unit.rpc.certificates import replace


def _certify(folder: Path, ca: trustme.CA) -> dict[str, str]:
    issued = ca.issue_cert("localhost", "127.0.0.1")
    replace(folder / "https.key", issued.private_key_pem.bytes())
    replace(folder / "https.crt", b"".join(pem.bytes() for pem in issued.cert_chain_pems))
    return {
        "HTTP_TLS_CERT": str(folder / "https.crt"),
        "HTTP_TLS_KEY": str(folder / "https.key"),
    }


async def _served_certificate(url: str, trust: ssl.SSLContext, name: str | None) -> str:
    host, port = url.removeprefix("https://").split(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=trust, server_hostname=name)
    der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    await writer.wait_closed()
    return hashlib.sha256(der).hexdigest()


@pytest.mark.asyncio
async def test_https_with_keys_that_rotate(tmp_path: Path) -> None:
    ca = trustme.CA()
    trust = ssl.create_default_context()
    ca.configure_trust(trust)
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # names no server, as a probe by address
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    secret, second = new_secret(), new_secret()
    keys = tmp_path / "keys"
    keys.write_text(ApiKey("alice", digest_of(secret)).line())
    settings = _certify(tmp_path, ca) | {"API_KEYS_FILE": str(keys)}
    async with (
        decode_server(ScriptedDecode([says("x", "y")])) as address,
        router_process(DECODES=address, **settings) as process,
    ):
        url = await url_of(process)
        assert url.startswith("https://")
        http = httpx.AsyncClient(verify=trust, trust_env=False)
        async with openai.AsyncOpenAI(
            base_url=f"{url}/v1", api_key=secret, http_client=http, max_retries=0
        ) as client:
            answer = await client.completions.create(model="tiny-dsv4", prompt="hi")
            assert answer.choices[0].text
            with pytest.raises(openai.AuthenticationError) as caught:
                await client.with_options(api_key=second).models.list()
            assert caught.value.code == "invalid_api_key"
            before = {
                await _served_certificate(url, c, n)
                for c, n in ((trust, "localhost"), (blind, None))
            }
            _certify(tmp_path, ca)
            keys.write_text(ApiKey("alice", digest_of(second)).line())
            after = {
                await _served_certificate(url, c, n)
                for c, n in ((trust, "localhost"), (blind, None))
            }
            assert (len(before), len(after)) == (1, 1)
            assert before != after
            assert [model.id async for model in client.with_options(api_key=second).models.list()]
            replace(tmp_path / "https.crt", b"nonsense")
            assert await _served_certificate(url, trust, "localhost") in after
        with pytest.raises(httpx.TransportError):
            async with httpx.AsyncClient(trust_env=False) as plain:
                await plain.get(url.replace("https", "http") + "/health")
