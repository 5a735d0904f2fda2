"""The checkpoint that ships, served by our forward: transformers' logits on real text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from sluice.config import PoolMode
from sluice.models.deepseek_v4.load import load_deepseek_v4
from tests.parity.deepseek_v4_oracle import streams_and_logits
from tests.parity.deepseek_v4_serving import Serving, Step, error

FOLDER = Path(__file__).parents[2] / "models" / "tiny-dsv4"
README = Path(__file__).parents[2] / "README.md"
LENGTH = 420


@pytest.fixture(scope="module")
def truth() -> tuple[list[int], Tensor]:
    torch.set_num_threads(1)
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = tokenizer.encode(README.read_text()).ids[:LENGTH]
    assert len(ids) == LENGTH
    target = DeepseekV4ForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return ids, streams_and_logits(target, ids)[1]


@pytest.mark.parametrize("mode", list(PoolMode), ids=lambda mode: mode.value)
def test_chunked_and_decoded_logits(truth: tuple[list[int], Tensor], mode: PoolMode) -> None:
    """Far enough that the indexer really selects, and that scores of exactly 0 tie at its border."""
    ids, expected = truth
    serving = Serving(load_deepseek_v4(FOLDER), mode)
    request = serving.open("shipped")
    for count in (LENGTH - 130, 100, *([1] * 30)):
        serving.step([Step(request, ids[request.length : request.length + count], count)])
    assert error(request, expected) <= 1e-4
    serving.close([request])
