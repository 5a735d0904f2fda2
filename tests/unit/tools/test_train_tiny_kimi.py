"""Training the small Kimi model and its draft: a few steps lower the loss; no corpus needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tools.measure_tiny_kimi import drafts_at, emitted_per_step
from tools.tiny_dspark_config import TinyDSparkConfig
from tools.tiny_dspark_export import export_draft, load_draft
from tools.tiny_dspark_model import TinyDSpark
from tools.tiny_kimi_config import TinyKimiConfig, read_config
from tools.tiny_kimi_export import export_checkpoint, load_checkpoint
from tools.tiny_kimi_generate import continue_rows
from tools.tiny_kimi_model import TinyKimi
from tools.tiny_tokenizer import train_tokenizer
from tools.train_tiny_dspark import Plan as DraftPlan
from tools.train_tiny_dspark import block_losses, random_anchors
from tools.train_tiny_dspark import train as train_draft
from tools.train_tiny_kimi import Plan, batch_loss, train
from tools.training_data import RowSource

SMALL = TinyKimiConfig(
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=3,
    mla_layers=(2,),
    linear_num_heads=2,
    linear_head_dim=16,
    num_attention_heads=2,
    kv_lora_rank=24,
    qk_nope_head_dim=16,
    qk_rope_head_dim=8,
    v_head_dim=12,
    num_experts=4,
    moe_intermediate_size=24,
)
DRAFT = TinyDSparkConfig(
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=1,
    head_dim=12,
    block_size=4,
    target_layer_ids=(2, 0),
    num_target_layers=3,
    markov_rank=10,
)
PLAN = Plan(steps=10, rows=4, tokens=64, seed=1)
DRAFT_PLAN = DraftPlan(steps=12, written_rows=2, corpus_rows=2, tokens=64, anchors=8, seed=1)


@pytest.fixture(scope="module")
def data() -> RowSource:
    torch.set_num_threads(1)
    return RowSource(train_tokenizer([], seed=1), [], seed=1)


@pytest.fixture
def target() -> TinyKimi:
    return TinyKimi(SMALL, seed=1)


@pytest.fixture
def draft(target: TinyKimi) -> TinyDSpark:
    return TinyDSpark(DRAFT, target.requires_grad_(False).eval(), seed=1)


def _written(target: TinyKimi, rows: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    prompt = torch.randint(3, SMALL.vocab_size, (rows, 9), generator=generator)
    return continue_rows(target, prompt, length, 0.0, generator)


def test_few_steps_lower_the_loss(data: RowSource, target: TinyKimi) -> None:
    batch = data.batch(77, 4, 64, 1.0)
    before = batch_loss(target, batch).item()
    losses = train(target, data, PLAN, None)
    assert len(losses) == PLAN.steps
    assert batch_loss(target, batch).item() < before - 0.05


def test_every_parameter_gets_a_gradient(data: RowSource, target: TinyKimi) -> None:
    batch_loss(target, data.batch(0, 4, 64, 1.0)).backward()
    assert [n for n, p in target.named_parameters() if p.grad is None] == []


def test_training_moves_router_biases_apart(data: RowSource, target: TinyKimi) -> None:
    train(target, data, replace(PLAN, steps=3), None)
    for moe in target.routers():
        assert moe.gate.e_score_correction_bias.abs().max() > 0


def test_forward_is_causal_and_padding_may_follow(data: RowSource, target: TinyKimi) -> None:
    target.eval()
    ids = data.batch(3, 1, 64, 1.0).ids
    with torch.no_grad():
        whole, part = target(ids)[0, :41], target(ids[:, :41])[0]
    torch.testing.assert_close(whole, part, atol=1e-5, rtol=0)


def test_rows_written_token_by_token_are_the_dense_models(target: TinyKimi) -> None:
    ids = _written(target.eval(), 3, 30)
    assert ids.shape == (3, 30)
    with torch.no_grad():
        best = target(ids).argmax(-1)
    assert torch.equal(ids[:, 9:], best[:, 8:-1])


def test_export_reads_back_as_it_was_up_to_bf16(tmp_path: Path, target: TinyKimi) -> None:
    export_checkpoint(target, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    for name in ("self_attn.A_log", "self_attn.dt_bias"):
        assert stored[f"model.layers.0.{name}"].dtype == torch.float32
    assert read_config(tmp_path) == SMALL
    again = load_checkpoint(tmp_path)
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, target.state_dict()[name], atol=1e-2, rtol=1e-2)


def test_draft_training_lowers_its_loss_and_leaves_the_target_alone(
    data: RowSource, target: TinyKimi, draft: TinyDSpark
) -> None:
    before = {n: v.clone() for n, v in target.state_dict().items()}
    written = _written(target, 6, 64)
    anchors = random_anchors(written, 8, DRAFT.block_size, torch.Generator().manual_seed(2))
    first = block_losses(draft, target, written, anchors).sum().item()
    train_draft(draft, target, written, data, DRAFT_PLAN, None)
    assert block_losses(draft, target, written, anchors).sum().item() < first - 0.05
    assert all(torch.equal(v, before[n]) for n, v in target.state_dict().items())
    assert not any(name.startswith("_shared") for name in draft.state_dict())


def test_a_block_sees_neither_later_tokens_nor_other_blocks(
    target: TinyKimi, draft: TinyDSpark
) -> None:
    ids = _written(target, 1, 40)
    changed = ids.clone()
    changed[:, 21:] = 7
    with torch.no_grad():
        context, later = (draft.context(target.streams(i)) for i in (ids, changed))
        alone = draft.hidden(context, ids, torch.tensor([[20]]))
        among = draft.hidden(later, changed, torch.tensor([[5, 20, 20, 30]]))
        other = draft.hidden(context, ids, torch.tensor([[19]]))
    torch.testing.assert_close(among[:, 1:2], alone, atol=1e-5, rtol=0)
    assert (other - alone).abs().max() > 1e-3


def test_greedy_drafts_are_the_argmax_of_their_own_logits(
    target: TinyKimi, draft: TinyDSpark
) -> None:
    ids, anchors = _written(target, 2, 32), torch.tensor([[4, 20], [9, 27]])
    with torch.no_grad():
        context = draft.context(target.streams(ids))
        drafts = draft.greedy(context, ids, anchors)
        previous = torch.cat((ids.gather(1, anchors).unsqueeze(-1), drafts[..., :-1]), dim=-1)
        logits = draft.logits(draft.hidden(context, ids, anchors), previous)
    assert torch.equal(logits.argmax(-1), drafts)


def test_draft_export_reads_back(tmp_path: Path, target: TinyKimi, draft: TinyDSpark) -> None:
    export_draft(draft, tmp_path)
    again = load_draft(tmp_path, target)
    assert again.config == DRAFT
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, draft.state_dict()[name], atol=1e-2, rtol=1e-2)


def test_emitted_per_step_walks_from_anchor_to_anchor() -> None:
    written = torch.tensor([10, 11, 12, 13, 14, 15, 16])
    drafts = torch.tensor([[11, 12], [12, 13], [13, 14], [14, 0], [0, 16], [16, 17], [17, 18]])
    # From 10 both stand (3 tokens), from 13 one (2); a block at 15 could not be checked.
    assert emitted_per_step(drafts, written) == [3, 2]
    assert emitted_per_step(torch.zeros_like(drafts), written) == [1] * 5


def test_drafts_at_know_only_what_precedes(target: TinyKimi, draft: TinyDSpark) -> None:
    ids = _written(target, 1, 24)
    assert torch.equal(
        drafts_at(target, draft, ids, 20)[:, 0], drafts_at(target, draft, ids[:, :21], 20)[:, 0]
    )
