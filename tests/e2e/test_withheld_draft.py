"""The bug this project exists for: without the draft's window, answers stay right and only acceptance falls."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from bench.acceptance import Variant, acceptance_length, held_out_prompts, measure
from sluice.config import PoolMode
from sluice.types import Sampling

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]


@pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
def test_withheld_draft_window_lowers_early_acceptance_and_changes_no_token(
    tmp_path: Path, model_dir: Path, mode: PoolMode
) -> None:
    prompts = held_out_prompts(model_dir, 20, 96)
    window = json.loads((model_dir / "config.json").read_text())["sliding_window"]
    sampling = Sampling(max_tokens=window // 2)

    async def variant(withheld: bool) -> Variant:
        folder = tmp_path / str(withheld)
        return await measure(model_dir, mode, withheld, prompts, sampling, folder)

    received, withheld = asyncio.run(variant(False)), asyncio.run(variant(True))
    assert received.outputs == withheld.outputs
    good, bad = (acceptance_length(v.steps) for v in (received, withheld))
    assert good > 1.02 * bad, f"early acceptance {good:.3f} with the window, {bad:.3f} without"
