"""The small Kimi Linear that ships: transformers, our forward and the trainer agree on it, and so do the
draft that serves, the trainer's, and a naive one."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import KimiLinearForCausalLM

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.models.base import ForwardBatch, Segment
from sluice.models.capture import HiddenCapture
from sluice.models.dspark.model import DSparkDraft
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.registry import load_model
from sluice.pools.memory import build_memory
from sluice.types import Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, run_all
from tests.unit.models.dspark.naive import NaiveDraft
from tests.unit.models.kimi_linear.tiny import Driver
from tools.measure_tiny_kimi import emitted_per_step
from tools.synthetic import filler_text, recall_document
from tools.tiny_dspark_export import DRAFT_FOLDER, load_draft
from tools.tiny_kimi_export import export_tensors, load_checkpoint
from tools.tiny_kimi_generate import continue_rows
from tools.tiny_kimi_model import TinyKimi

FOLDER = Path(__file__).parents[2] / "models" / "tiny-kimi"
OPENING = "And it came to pass, when the king heard the words of the woman, that he"
TOKENS = 288
CHUNK = 70
# What a random draft never reaches; the measured rate is in the model card.
LEAST_TOKENS_A_STEP = 3.0


@dataclass(frozen=True)
class Shipped:
    """The folder as the engine loads it, as the trainer does, and one text."""

    target: KimiLinearTarget
    draft: DSparkDraft
    trained: TinyKimi
    ids: list[int]


@pytest.fixture(scope="module")
def shipped() -> Shipped:
    torch.set_num_threads(1)
    loaded = load_model(FOLDER)
    assert isinstance(loaded.target, KimiLinearTarget)
    assert isinstance(loaded.draft, DSparkDraft)
    rng = random.Random(3)
    text = recall_document(rng, 20, 20, 300).text + filler_text(rng, 500, ())
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids = [0, *tokenizer.encode(text, add_special_tokens=False).ids][:TOKENS]
    assert len(ids) == TOKENS
    return Shipped(loaded.target, loaded.draft, load_checkpoint(FOLDER), ids)


@pytest.fixture(scope="module")
def truth(shipped: Shipped) -> Tensor:
    theirs = KimiLinearForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        logits: Tensor = theirs(torch.tensor([shipped.ids]), use_cache=False).logits[0]
    return logits


def test_trainers_logits_equal_transformers(shipped: Shipped, truth: Tensor) -> None:
    """The exact form; that in chunks, which trained, differs where a gate forgets nearly everything."""
    ids = torch.tensor([shipped.ids])
    with torch.no_grad():
        scanned = shipped.trained.eval()(ids)[0]
        chunked = shipped.trained.train()(ids)[0]
    shipped.trained.eval()
    assert (scanned - truth).abs().max() <= 1e-3
    assert (chunked.argmax(-1) == truth.argmax(-1)).float().mean() >= 0.98
    assert (chunked - truth).abs().mean() <= 0.02


def test_served_logits_equal_transformers(shipped: Shipped, truth: Tensor) -> None:
    """Chunks, then single tokens."""
    driver = Driver(shipped.target)
    tables = driver.open()
    sizes = [CHUNK, 1, CHUNK - 3, 1, 1]
    rows = [driver.feed([(tables, shipped.ids[tables.kv_len :][:size])]) for size in sizes]
    got = torch.cat(rows)
    assert (got - truth[: len(got)]).abs().max() <= 1e-3


def test_served_draft_equals_the_trainers_and_the_naive_one(shipped: Shipped) -> None:
    length = 90
    memory = build_memory(
        (*shipped.target.state_needs("float32"), *shipped.draft.state_needs("float32")),
        PoolConfig(page_tokens=16, num_pages=40, num_slots=4, fill="nan"),
        shipped.draft.config.verify_tokens,
    )
    tables = memory.open(RequestId("r"), 200)
    memory.extend(tables, length)
    batch = ForwardBatch.build([Segment(tables, 0, tuple(shipped.ids[:length]))], memory)
    capture = HiddenCapture(shipped.draft.config.target_layer_ids)
    shipped.target.forward(batch, memory, capture)
    shipped.draft.inject(batch, capture.hidden(), memory)
    tables.kv_len = length
    anchor = shipped.ids[length]
    memory.extend(tables, length + 1)
    served = shipped.draft.block([tables], [anchor], memory).hidden_BSD[0]

    draft, ids = load_draft(FOLDER, shipped.trained), torch.tensor([shipped.ids])
    with torch.no_grad():
        context = draft.context(shipped.trained.streams(ids))
        ours = draft.hidden(context, ids, torch.tensor([[length]]))[0, 0]
    assert (served - ours).abs().max() <= 1e-3

    naive = _naive(shipped)
    streams = capture.hidden()
    expected = torch.stack(naive.hidden(streams, anchor)).float()
    assert (served - expected).abs().max() <= 1e-3
    drafts = draft.greedy(context, ids, torch.tensor([[length]]))[0, 0].tolist()
    assert drafts == naive.greedy(streams, anchor)


def _naive(shipped: Shipped) -> NaiveDraft:
    folder = FOLDER / DRAFT_FOLDER
    tensors = load_file(folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    return NaiveDraft(raw, tensors, shipped.target.embedding.rows, shipped.target.vocabulary.rows)


def test_greedy_drafts_stand_well_above_one(shipped: Shipped) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    prompt = torch.tensor([[0, *tokenizer.encode(OPENING, add_special_tokens=False).ids]])
    length = prompt.shape[1]
    ids = continue_rows(shipped.trained, prompt, length + 96, 0.0, torch.Generator())
    draft, anchors = load_draft(FOLDER, shipped.trained), torch.arange(length, ids.shape[1])[None]
    with torch.no_grad():
        drafts = draft.greedy(draft.context(shipped.trained.streams(ids)), ids, anchors)[0]
    steps = emitted_per_step(drafts, ids[0, length:])
    assert sum(steps) / len(steps) >= LEAST_TOKENS_A_STEP


def test_speculation_with_the_trained_draft_changes_no_token() -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    words = OPENING.split()
    requests = [
        Request(
            RequestId(f"r{cut}"),
            (0, *tokenizer.encode(" ".join(words[:cut]), add_special_tokens=False).ids),
            Sampling(max_tokens=60, ignore_eos=True),
        )
        for cut in (1, 5, 11, len(words))
    ]

    def served(spec: SpecConfig | None) -> dict[RequestId, Story]:
        core = build_engine(FOLDER, Role.AGGREGATED, PoolConfig(), spec, EngineConfig())
        return run_all(core, requests)

    drafted, plain = served(None), served(SpecConfig(0))
    assert {n: s.tokens for n, s in drafted.items()} == {n: s.tokens for n, s in plain.items()}
    accepted = [n for story in drafted.values() for n in story.accepted if n is not None]
    assert sum(accepted) / len(accepted) >= LEAST_TOKENS_A_STEP - 1


def test_file_holds_exactly_the_published_tensors(shipped: Shipped) -> None:
    stored = load_file(FOLDER / "model.safetensors")
    expected = export_tensors(shipped.trained)
    assert {n: (t.dtype, t.shape) for n, t in stored.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
