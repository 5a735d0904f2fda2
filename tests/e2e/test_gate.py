"""The gate between real pods: a pair that doesn't fit is refused by name before anything moves, and recovers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from sluice.errors import LayoutRefused
from sluice.rpc.client import DecodeClient, PrefillClient
from tests.e2e.pods import Pair, eventually, generate

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(180)]


@pytest.mark.parametrize(
    ("settings", "path"),
    [
        ({"prefill_page_tokens": "256"}, "geometry.page_tokens"),
        ({"prefill_pool_mode": "unified"}, "geometry.pool_mode"),
        ({"decode_spec_steps": "0"}, "spec.algorithm"),
    ],
)
def test_a_pair_that_does_not_fit_is_refused_by_name(
    tmp_path: Path, model_dir: Path, settings: dict[str, str], path: str
) -> None:
    pair = Pair.create(tmp_path, model_dir, **settings)

    async def refused() -> None:
        async with DecodeClient(pair.decode.address) as client:

            async def look() -> str:
                status = await client.get_status(2.0)
                return next((p.reason for p in status.peers if p.state == "refused"), "")

            reason = await eventually(look, 60, "refused")
            assert path in reason
            report = await client.pair(pair.prefill.address, 20.0)
            assert not report.agreed
            assert path in {mismatch.path for mismatch in report.mismatches}
            with pytest.raises(LayoutRefused, match=path):
                await generate(pair, (5, 6, 7))
        async with PrefillClient(pair.prefill.address) as prefill:
            status = await prefill.get_status(2.0)
            assert status.paired == 0, "nothing was connected"

    pair.start()
    try:
        asyncio.run(refused())
    finally:
        pair.kill()


def test_draft_on_one_side_is_agreed_only_when_asked_for(tmp_path: Path, model_dir: Path) -> None:
    """With the flag, decode drafts from an invalid window: the answer is the same, and drafting comes back."""
    pair = Pair.create(
        tmp_path, model_dir, prefill_spec_steps="0", decode_allow_missing_draft="true"
    )

    async def run() -> None:
        await pair.ready()
        async with DecodeClient(pair.decode.address) as client:
            report = await client.pair(pair.prefill.address, 20.0)
        assert report.agreed
        assert all(not m.component.startswith("draft.") for m in report.components)
        answer = await generate(pair, tuple(range(3, 103)))
        assert len(answer.token_ids) == 16
        assert answer.accepted[1] is None, "the first step has nothing to draft from"
        assert any(accepted is not None for accepted in answer.accepted)

    pair.start()
    try:
        asyncio.run(run())
    finally:
        pair.kill()
