"""The bug this project exists for: without the draft's state, answers stay right and only acceptance falls."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.acceptance import (
    Variant,
    Workload,
    acceptance_length,
    copy_prompts,
    draft_components,
    held_out_prompts,
    measure,
)
from sluice.config import PoolMode
from sluice.types import Sampling

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.timeout(400)]
MODELS = Path(__file__).parents[2] / "models"


@dataclass(frozen=True)
class Draft:
    """A shipped model and its pool mode; ``copies``: its target can repeat a list, so the draft has to."""

    model: str
    mode: PoolMode = PoolMode.PAGED
    copies: bool = False

    def __str__(self) -> str:
        return f"{self.model}-{self.mode.value}"


DRAFTS = [
    Draft("tiny-dsv4", copies=True),
    Draft("tiny-dsv4", PoolMode.UNIFIED, copies=True),
    Draft("tiny-kimi"),
]


@pytest.mark.parametrize("draft", DRAFTS, ids=str)
def test_withheld_draft_state_lowers_early_acceptance_and_changes_no_token(
    tmp_path: Path, draft: Draft
) -> None:
    """What the draft knows of the prompt lies only in its component: without it, it can only guess."""
    folder = MODELS / draft.model
    component = draft_components(folder)[draft.mode]
    prompts = copy_prompts(folder, 16) if draft.copies else held_out_prompts(folder, 16, 120)
    sampling = Sampling(max_tokens=12, ignore_eos=True)
    work = Workload("to continue", tuple(prompts), sampling)

    async def variant(withheld: str) -> Variant:
        place = tmp_path / (withheld or "received")
        (measured,) = await measure(folder, draft.mode, withheld, [work], place)
        return measured

    received, withheld = asyncio.run(variant("")), asyncio.run(variant(component))
    assert received.outputs == withheld.outputs
    good, bad = acceptance_length(received.steps), acceptance_length(withheld.steps)
    assert good > 1.25 * bad, f"early acceptance {good:.3f} with it, {bad:.3f} without"
