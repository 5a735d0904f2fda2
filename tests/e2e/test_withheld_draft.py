"""The bug this project exists for: without the draft's window, answers stay right and only acceptance falls."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bench.acceptance import Variant, Workload, acceptance_length, copy_prompts, measure
from sluice.config import PoolMode
from sluice.types import Sampling

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]


@pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
def test_withheld_draft_window_lowers_early_acceptance_and_changes_no_token(
    tmp_path: Path, model_dir: Path, mode: PoolMode
) -> None:
    """The list to copy lies inside the draft's window, so a draft without it can only guess."""
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    copying = Workload("copying", tuple(copy_prompts(model_dir, 16)), sampling)

    async def variant(withheld: bool) -> Variant:
        (measured,) = await measure(model_dir, mode, withheld, [copying], tmp_path / str(withheld))
        return measured

    received, withheld = asyncio.run(variant(False)), asyncio.run(variant(True))
    assert received.outputs == withheld.outputs
    good, bad = acceptance_length(received.steps), acceptance_length(withheld.steps)
    assert good > 1.25 * bad, f"early acceptance {good:.3f} with the window, {bad:.3f} without"
