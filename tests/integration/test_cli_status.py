"""``sluice status`` reads what the real router says, with and without a key that opens its status page."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from sluice.apikeys import ApiKey, digest_of, new_secret
from sluice.cli.status import Status, read_status
from tests.integration.router_harness import PREFILL, ScriptedDecode, router_over, says


@pytest.mark.asyncio
async def test_the_fleet_is_shown_to_an_operator_and_readiness_to_anybody(tmp_path: Path) -> None:
    user, operator = new_secret(), new_secret()
    keys = tmp_path / "keys"
    lines = [ApiKey("u", digest_of(user)), ApiKey("o", digest_of(operator), operator=True)]
    keys.write_text("\n".join(key.line() for key in lines))
    async with router_over(ScriptedDecode([says("x")]), api_keys_file=keys) as stack:

        async def seen_with(secret: str) -> Status:
            headers = {"authorization": f"Bearer {secret}"} if secret else {}
            async with httpx.AsyncClient(
                base_url=stack.url, headers=headers, trust_env=False
            ) as client:
                return await read_status(client)

        whole = await seen_with(operator)
        assert whole.ready
        assert [pod.role for pod in whole.pods] == ["decode", "prefill"]
        assert [(pair.decode, pair.prefill) for pair in whole.pairs] == [
            (stack.addresses[0], PREFILL)
        ]
        assert whole.pairs[0].usable
        assert whole.totals is not None
        for secret in (user, ""):
            less = await seen_with(secret)
            assert less.ready
            assert [pair.prefill for pair in less.pairs] == [PREFILL]
            assert less.pods == ()
        async with httpx.AsyncClient(base_url=stack.url, trust_env=False) as browser:
            for path in ("/", "/metrics", "/status.json"):
                assert (await browser.get(path)).status_code == 401
                assert (await browser.get(path, auth=("me", operator))).status_code == 200
                assert (await browser.get(path, auth=("me", user))).status_code == 403
