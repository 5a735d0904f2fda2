"""Training the small model: a few steps on synthetic text lower the loss, in both phases; no corpus needed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.tiny_dsv4_config import TinyConfig
from tools.tiny_dsv4_export import export_checkpoint, load_checkpoint, read_config
from tools.tiny_dsv4_model import TinyDeepseekV4
from tools.tiny_tokenizer import BOS, EOS, PAD, train_tokenizer
from tools.train_tiny_dsv4 import (
    Plan,
    chain_losses,
    joint_losses,
    train_joint,
    train_nextn,
)
from tools.training_data import Batch, RowSource

SMALL = TinyConfig(
    hidden_size=64,
    head_dim=16,
    q_lora_rank=32,
    o_lora_rank=16,
    moe_intermediate_size=32,
    index_topk=8,
    layer_ratios=(0, 4, 128),
)
PLAN = Plan(steps=8, nextn_steps=6, rows=4, tokens=128, seed=1)


@pytest.fixture(scope="module")
def data() -> RowSource:
    torch.set_num_threads(1)
    return RowSource(train_tokenizer([], seed=1), [], seed=1)


@pytest.fixture
def model() -> TinyDeepseekV4:
    return TinyDeepseekV4(SMALL, seed=1)


def _fixed_loss(model: TinyDeepseekV4, batch: Batch) -> float:
    with torch.no_grad():
        return joint_losses(model, batch)[0].item()


def test_few_steps_lower_the_loss(data: RowSource, model: TinyDeepseekV4) -> None:
    batch = data.batch(77, 4, 128, 1.0)
    before = _fixed_loss(model, batch)
    losses = train_joint(model, data, PLAN, None)
    assert len(losses) == PLAN.steps
    assert _fixed_loss(model, batch) < before - 0.05


def test_nextn_phase_lowers_its_loss_and_leaves_the_target_alone(
    data: RowSource, model: TinyDeepseekV4
) -> None:
    before = {n: v.clone() for n, v in model.state_dict().items()}
    batch = data.batch(77, 4, 128, 1.0)
    with torch.no_grad():
        first = [v.item() for v in chain_losses(model, batch)]
    train_nextn(model, data, PLAN, None)
    with torch.no_grad():
        last = [v.item() for v in chain_losses(model, batch)]
    assert sum(last) < sum(first)
    changed = {n for n, v in model.state_dict().items() if not torch.equal(v, before[n])}
    assert changed
    assert all(n.startswith("mtp.") for n in changed)


def test_every_trained_parameter_gets_a_gradient(data: RowSource, model: TinyDeepseekV4) -> None:
    for attention in model.attentions():
        attention.select, attention.index_rows = True, 2
    main, drafted, index = joint_losses(model, data.batch(0, 4, 128, 1.0))
    (main + drafted + index).backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert missing == []


def test_forward_is_causal_and_ignores_what_follows(data: RowSource, model: TinyDeepseekV4) -> None:
    model.eval()
    ids = data.batch(3, 1, 160, 1.0).ids
    other = ids.clone()
    other[:, 133:] = 7
    with torch.no_grad():
        a, b = (model.logits(model.streams(i))[0, :133] for i in (ids, other))
    torch.testing.assert_close(a, b, atol=1e-5, rtol=0)


def test_export_reads_back_as_it_was_up_to_bf16(tmp_path: Path, model: TinyDeepseekV4) -> None:
    export_checkpoint(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert stored["embed.weight"].dtype == torch.bfloat16
    assert stored["layers.0.hc_attn_fn"].dtype == torch.float32
    assert stored["mtp.0.ffn.gate.bias"].dtype == torch.float32
    assert "mtp.0.ffn.gate.tid2eid" not in stored
    assert read_config(tmp_path) == SMALL
    again = load_checkpoint(tmp_path)
    for name, value in again.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], atol=1e-2, rtol=1e-2)


def test_config_json_has_the_trailing_ratio_of_nextn() -> None:
    content = replace(SMALL, layer_ratios=(0, 4)).official_json()
    assert content["compress_ratios"] == [0, 4, 0]
    assert content["num_hidden_layers"] == 2
    assert content["num_nextn_predict_layers"] == 1


def test_tokenizer_covers_every_byte_and_fixes_special_ids() -> None:
    tokenizer = train_tokenizer(["a short text"], seed=0)
    assert [tokenizer.token_to_id(t) for t in (BOS, EOS, PAD)] == [0, 1, 2]
    text = "tab\tnewline\n\x00 é 漢 🙂"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids) == text


def test_batches_depend_only_on_seed_and_step(data: RowSource) -> None:
    a, b, c = (data.batch(step, 2, 64, 1.0) for step in (5, 5, 6))
    assert torch.equal(a.ids, b.ids)
    assert not torch.equal(a.ids, c.ids)


def test_answers_weigh_more_than_noise(data: RowSource) -> None:
    batch = data.batch(0, 4, 256, 1.0)
    assert batch.answers.any()
    assert (batch.weight[batch.answers] == 2.0).all()
    assert batch.weight[~batch.answers].max() == 1.0
