"""The status page in a real browser, served by a real router over scripted decode pods."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from playwright.async_api import Page, async_playwright

from sluice.errors import PeerLost
from sluice.rpc.messages import (
    Acceptance,
    CanaryStatus,
    Finished,
    GenerateCall,
    PeerStatus,
    PoolComponent,
    PoolStatus,
    PrefillStatus,
    Tokens,
)
from sluice.transfer.messages import Moved, Timings
from sluice.types import Epoch, FinishReason
from tests.integration.router_harness import (
    READY,
    USAGE,
    Event,
    ScriptedDecode,
    Stack,
    fails,
    router_over,
)

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
).split()
SECRET = "Behold the wheelbarrow"
TIMINGS = Timings(0.01, 0.04, 0.02, 0.005, 0.005, 0.08)
PAGES = PoolStatus("PAGE", 100, 60, 30, 4, 6, (PoolComponent("target.c4", 1 << 20),))
PREFILL = PrefillStatus(Epoch("pe"), True, "", 0, 2, 1, 2, (PAGES,))
CANARY = CanaryStatus(
    time.time(), 0.05, "", "cma/memory", (Moved("target.c4", 9, 5000, b"", 0.001),)
)
WHY = "1 fatal difference (and 5 that follow): geometry.page_tokens: prefill 256, decode 128"
STATUS = replace(
    READY,
    peers=(
        PeerStatus("prefill.test:1", "p1", "agreed", "", "d1g35t", 0, CANARY, PREFILL),
        PeerStatus("prefill.test:2", "p2", "refused", WHY),
    ),
    pools=(PAGES,),
    acceptance=Acceptance(True, 2.5, 400),
)
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.optional(reason="there may be no Chromium where this runs"),
    pytest.mark.skipif(not CHROMIUM, reason="no chromium found"),
]


async def answers(_: GenerateCall) -> AsyncIterator[Event]:
    yield Tokens((70,), timings=TIMINGS)
    yield Tokens((71, 72), 1)
    yield Finished(FinishReason.LENGTH, replace(USAGE, timings=TIMINGS))


@asynccontextmanager
async def opened(stack: Stack) -> AsyncIterator[Page]:
    """The page; whatever the browser's console says at level warning or error fails the test."""
    said: list[str] = []
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        page = await browser.new_page(viewport={"width": 1440, "height": 900})
        page.on(
            "console", lambda m: said.append(m.text) if m.type in ("warning", "error") else None
        )
        page.on("pageerror", lambda error: said.append(str(error)))
        await page.goto(stack.url + "/")
        await page.locator("#totals dd").first.wait_for()
        yield page
        await browser.close()
    assert not said


async def test_the_fleet_the_timeline_and_no_word_of_a_prompt() -> None:
    decode = ScriptedDecode([answers, fails(PeerLost("gone", stage="transfer"))], STATUS)
    async with router_over(decode, retries=0) as stack:
        assert (await stack.post(prompt=SECRET, max_tokens=3)).status_code == 200
        assert (await stack.post(prompt=SECRET, max_tokens=3)).status_code == 503
        async with opened(stack) as page:
            matrix = page.locator("#matrix")
            assert await matrix.get_by_text("agreed", exact=True).count() == 1
            assert await matrix.get_by_text("refused", exact=True).count() == 1
            assert await matrix.get_by_text(WHY).count() == 1
            assert await matrix.get_by_text("over cma/memory").count() == 1
            assert await matrix.get_by_text("unknown", exact=True).count() == 0, (
                "the corner is empty"
            )
            rows = page.locator("#answers tbody tr")
            assert await rows.count() == 2
            assert await rows.nth(0).get_by_text("PeerLost").count() == 1
            bar = rows.nth(1).locator(".bar")
            label = await bar.get_attribute("aria-label") or ""
            assert "prefill 40.0 ms, transfer 20.0 ms" in label
            pieces = bar.locator("i")
            assert await pieces.count() == 6, "to the first token"
            await page.locator("input[value=whole]").check(force=True)
            assert await pieces.count() == 7, "and decode"
            pool = page.get_by_role("img", name="pages: 30 held, 6 cached, 4 quarantined, 60 free")
            assert await pool.count() == 2, "of decode, and of the prefill it hears of"
            assert await page.get_by_text("acceptance 2.50 over 400 steps").count() == 1
            for width in (1440, 800):
                await page.set_viewport_size({"width": width, "height": 900})
                wide = await page.evaluate("document.documentElement.scrollWidth")
                assert wide <= width, "only tables may scroll sideways"
            if shots := os.environ.get("STATUS_PAGE_SHOTS"):  # for people who change the page
                await _shoot(page, Path(shots))
            assert SECRET not in await page.content()
            assert SECRET not in (await stack.http.get("/status.json")).text


async def _shoot(page: Page, folder: Path) -> None:
    for width, scheme in ((1440, "light"), (1440, "dark"), (800, "light")):
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        await page.screenshot(path=folder / f"{width}-{scheme}.png", full_page=True)


async def test_pods_that_vanish_and_return_are_said_so_without_a_script_error() -> None:
    decode = ScriptedDecode([answers], STATUS)
    async with router_over(decode, refresh_s=0.05) as stack:
        async with opened(stack) as page:
            badge = page.locator("#ready")
            assert await badge.text_content() == "serving"
            decode.status = replace(READY, ready=False, reason="no prefill has agreed", peers=())
            await page.get_by_text("not serving", exact=True).wait_for()
            alarm = page.locator(".alarm").first
            assert "No pair can serve" in (await alarm.text_content() or "")
            decode.status = STATUS
            await page.get_by_text("serving", exact=True).wait_for()
            assert await page.locator(".alarm").count() == 0
            decode.status = replace(STATUS, acceptance=Acceptance(True, 1.02, 1000, True))
            await alarm.wait_for()
            assert "1.02 tokens a verify step" in (await alarm.text_content() or "")
