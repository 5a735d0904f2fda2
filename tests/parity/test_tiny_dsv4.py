"""The checkpoint that ships, read by transformers: its target and NextN layer mean what we trained."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import DeepseekV4ForCausalLM

from tests.parity.deepseek_v4_oracle import NextnOracle
from tools.synthetic import filler_text, recall_document
from tools.tiny_dsv4_export import export_tensors, load_checkpoint, read_config
from tools.tiny_dsv4_generate import draft_chain, run_target
from tools.tiny_dsv4_model import TinyDeepseekV4

FOLDER = Path(__file__).parents[2] / "models" / "tiny-dsv4"
TOKENS = 300
_NEXTN_NAMES = {
    "block.self_attn.q_a_proj.weight": "attn.wq_a.weight",
    "block.self_attn.q_a_norm.weight": "attn.q_norm.weight",
    "block.self_attn.q_b_proj.weight": "attn.wq_b.weight",
    "block.self_attn.kv_proj.weight": "attn.wkv.weight",
    "block.self_attn.kv_norm.weight": "attn.kv_norm.weight",
    "block.self_attn.o_a_proj.weight": "attn.wo_a.weight",
    "block.self_attn.o_b_proj.weight": "attn.wo_b.weight",
    "block.self_attn.sinks": "attn.attn_sink",
    "block.mlp.gate.weight": "ffn.gate.weight",
    "block.mlp.gate.e_score_correction_bias": "ffn.gate.bias",
    "block.mlp.shared_experts.gate_proj.weight": "ffn.shared_experts.w1.weight",
    "block.mlp.shared_experts.up_proj.weight": "ffn.shared_experts.w3.weight",
    "block.mlp.shared_experts.down_proj.weight": "ffn.shared_experts.w2.weight",
    "block.input_layernorm.weight": "attn_norm.weight",
    "block.post_attention_layernorm.weight": "ffn_norm.weight",
    **{
        f"block.{k}_hc.{p}": f"hc_{k}_{p}" for k in ("attn", "ffn") for p in ("fn", "base", "scale")
    },
    **{f"hc_head.hc_{p}": f"hc_head_{p}" for p in ("fn", "base", "scale")},
    **{f"{n}.weight": f"{n}.weight" for n in ("enorm", "hnorm", "norm", "e_proj", "h_proj")},
}


@pytest.fixture(scope="module")
def ours() -> TinyDeepseekV4:
    torch.set_num_threads(1)
    return load_checkpoint(FOLDER)


@pytest.fixture(scope="module")
def theirs() -> DeepseekV4ForCausalLM:
    return DeepseekV4ForCausalLM.from_pretrained(
        FOLDER, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="module")
def ids() -> list[int]:
    """Text with far references, so that the indexer's choice matters."""
    rng = random.Random(3)
    text = recall_document(rng, 20, 20, 400).text + filler_text(rng, 600, ())
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    return [0, *tokenizer.encode(text, add_special_tokens=False).ids][:TOKENS]


def _nextn_oracle(target: DeepseekV4ForCausalLM) -> NextnOracle:
    oracle = NextnOracle(target, seed=0)
    official = {
        name.removeprefix("mtp.0."): value.float()
        for name, value in load_file(FOLDER / "model.safetensors").items()
        if name.startswith("mtp.0.")
    }
    experts = range(target.config.num_local_experts)
    state = {
        name: official[_NEXTN_NAMES[name]] for name in oracle.state_dict() if name in _NEXTN_NAMES
    }
    gate_up = [
        torch.cat([official[f"ffn.experts.{e}.w1.weight"], official[f"ffn.experts.{e}.w3.weight"]])
        for e in experts
    ]
    state["block.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    down = [official[f"ffn.experts.{e}.w2.weight"] for e in experts]
    state["block.mlp.experts.down_proj"] = torch.stack(down)
    oracle.load_state_dict(state, strict=True)
    return oracle


def _streams(model: DeepseekV4ForCausalLM, ids: list[int]) -> tuple[Tensor, Tensor]:
    captured: list[Tensor] = []
    hook = model.model.layers[-1].register_forward_hook(
        lambda _m, _i, output: captured.append(output)
    )
    try:
        with torch.no_grad():
            logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        hook.remove()
    return captured[0][0], logits


def test_target_logits_equal_transformers(
    ours: TinyDeepseekV4, theirs: DeepseekV4ForCausalLM, ids: list[int]
) -> None:
    assert len(ids) == TOKENS
    assert TOKENS // 4 > ours.config.index_topk  # selection truncates
    _, expected = _streams(theirs, ids)
    _, got = run_target(ours, ids)
    assert (got - expected).abs().max() <= 1e-3
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def test_nextn_logits_and_chain_equal_oracle(
    ours: TinyDeepseekV4, theirs: DeepseekV4ForCausalLM, ids: list[int]
) -> None:
    oracle = _nextn_oracle(theirs)
    x, _ = _streams(theirs, ids)
    x = x[:-1]
    with torch.no_grad():
        cache = oracle.new_cache()
        y = oracle(x, torch.tensor(ids[1:]), 0, cache)
        expected = oracle.logits(y)
        pad = -len(x) % ours.config.sliding_window
        got = ours.draft_logits(
            ours.draft(
                torch.cat([x, x[:pad]]).unsqueeze(0), torch.tensor([[*ids[1:], *([0] * pad)]])
            )
        )[0, : len(x)]
        assert (got - expected).abs().max() <= 1e-3
        chain = [int(expected[-1].argmax())]
        for depth in range(2):
            y = oracle(y[-1:], torch.tensor(chain[-1:]), len(x) + depth, cache)
            chain.append(int(oracle.logits(y)[-1].argmax()))
    assert draft_chain(ours, x, ids, 3) == chain


def test_file_holds_exactly_the_official_tensors(ours: TinyDeepseekV4) -> None:
    stored = load_file(FOLDER / "model.safetensors")
    expected = export_tensors(ours)
    assert {n: (t.dtype, t.shape) for n, t in stored.items()} == {
        n: (t.dtype, t.shape) for n, t in expected.items()
    }
    assert stored["layers.0.ffn.gate.tid2eid"].dtype == torch.int64
    assert stored["layers.1.attn.compressor.ape"].dtype == torch.float32
    assert read_config(FOLDER).layer_ratios == (0, 4, 128, 4)
