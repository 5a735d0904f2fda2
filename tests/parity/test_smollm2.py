"""A real pretrained model: our greedy text is transformers' greedy text, token for token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import run_all

FOLDER = Path(__file__).parents[2] / "models" / "smollm2"
MAX_TOKENS = 24
QUESTIONS = (
    "What is the capital of France?",
    "Name 3 colours, and 12 apples.",
    "Write one sentence about the sea. " * 5,
)
PAGE = 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.optional(reason="needs a 93 MB download: make model-smollm2"),
    pytest.mark.skipif(
        not (FOLDER / "config.json").exists(), reason="no models/smollm2: make model-smollm2"
    ),
]


@dataclass(frozen=True)
class Pair:
    """Our engine and tokenizer, and transformers'."""

    core: EngineCore
    tokenizer: ModelTokenizer
    truth: PreTrainedModel
    truth_tokenizer: PreTrainedTokenizerBase

    def prompt(self, question: str) -> tuple[int, ...]:
        """Ids through the chat template; both tokenizers agree on them."""
        chat = [{"role": "user", "content": question}]
        text = self.truth_tokenizer.apply_chat_template(
            chat, tokenize=False, add_generation_prompt=True
        )
        ids = self.tokenizer.encode(text)
        assert list(ids) == self.truth_tokenizer(text).input_ids
        return ids

    def true_text(self, prompt: tuple[int, ...]) -> list[int]:
        ids = torch.tensor([prompt])
        out = self.truth.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
        added: list[int] = out[0, len(prompt) :].tolist()
        return added


@pytest.fixture(scope="module")
def pair() -> Pair:
    torch.set_num_threads(1)
    pool = PoolConfig(page_tokens=PAGE, num_pages=32, num_slots=4, fill="nan")
    config = EngineConfig(max_batch_tokens=48)
    core = build_engine(FOLDER, Role.AGGREGATED, pool, SpecConfig(3), config)
    return Pair(
        core,
        ModelTokenizer.load(FOLDER),
        AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval(),
        AutoTokenizer.from_pretrained(FOLDER),
    )


def test_greedy_text_equals_transformers(pair: Pair) -> None:
    """Chunked and batched by the scheduler, over page boundaries."""
    prompts = [pair.prompt(question) for question in QUESTIONS]
    assert max(map(len, prompts)) > 2 * PAGE
    requests = [
        Request(RequestId(f"q{n}"), prompt, Sampling(max_tokens=MAX_TOKENS))
        for n, prompt in enumerate(prompts)
    ]
    stories = run_all(pair.core, requests)
    for one in requests:
        assert stories[one.request_id].tokens == pair.true_text(one.prompt)
    answer = pair.tokenizer.decode(stories[RequestId("q0")].tokens)
    assert answer == "The capital of France is Paris."
