"""One damaged bit in any component is found before a token is made from it, and named."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from sluice.config import PoolMode
from sluice.errors import DigestMismatch
from sluice.rpc.client import DecodeClient
from tests.e2e.pods import Pair, generate

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(200)]

PROMPT = tuple(3 + i % 200 for i in range(300))
MODELS = Path(__file__).parents[2] / "models"


async def flips_are_named(pair: Pair, prompt: tuple[int, ...], components: Sequence[str]) -> None:
    """One bit of each component in turn: that request fails by the component's name, the next one answers."""
    before = await generate(pair, prompt)
    for name in components:
        (pair.faults / f"flip.{name}").touch()
        with pytest.raises(DigestMismatch, match=f"{re.escape(name)}[^._a-z0-9]"):
            await generate(pair, prompt)
        assert (await generate(pair, prompt)).token_ids == before.token_ids
    await pair.baseline()


@pytest.mark.parametrize(
    ("model", "mode"),
    [
        ("tiny-dsv4", PoolMode.PAGED),
        ("tiny-dsv4", PoolMode.UNIFIED),
        ("tiny-kimi", PoolMode.PAGED),
    ],
)
def test_a_flipped_bit_in_any_component_fails_the_request_and_only_it(
    tmp_path: Path, model: str, mode: PoolMode
) -> None:
    pair = Pair.create(tmp_path, MODELS / model, pool_mode=mode.value)

    async def run() -> None:
        await pair.ready()
        async with DecodeClient(pair.decode.address) as client:
            components = [c.name for c in (await client.get_layout(5.0)).layout.components]
        assert len(components) >= 5
        await flips_are_named(pair, PROMPT, components)

    pair.start()
    try:
        asyncio.run(run())
    finally:
        pair.kill()
