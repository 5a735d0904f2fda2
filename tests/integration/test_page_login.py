"""A real browser and the status page behind API keys: the key is the password."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from playwright.async_api import async_playwright

from sluice.apikeys import ApiKey, digest_of, new_secret
from tests.integration.router_harness import ScriptedDecode, router_over, says

_CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.asyncio
@pytest.mark.optional(reason="needs Chromium")
async def test_a_browser_logs_in_and_the_page_fetches_what_it_shows(tmp_path: Path) -> None:
    """Chromium reads one challenge a header: a second one behind a comma is no login."""
    if _CHROMIUM is None:
        pytest.skip("no Chromium here")
    secret = new_secret()
    (tmp_path / "keys").write_text(ApiKey("ops", digest_of(secret), operator=True).line())
    async with (
        router_over(ScriptedDecode([says("x")]), api_keys_file=tmp_path / "keys") as stack,
        async_playwright() as playwright,
    ):
        browser = await playwright.chromium.launch(
            executable_path=_CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        try:
            context = await browser.new_context(
                http_credentials={"username": "anybody", "password": secret}
            )
            page = await context.new_page()
            async with page.expect_response("**/status.json") as fetched:
                answer = await page.goto(f"{stack.url}/")
            assert answer is not None
            assert answer.status == 200
            assert (await fetched.value).status == 200
        finally:
            await browser.close()
