"""Draft checkpoints on disk: published names, skipped copies, and complaints that name the tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sluice.errors import CheckpointError, ConfigError
from sluice.models.dspark.load import load_dspark
from tests.unit.models.dspark.tiny import (
    HIDDEN,
    VOCAB,
    inject,
    make_pair,
    memory_of,
    opened,
    prompt_of,
)

CONFIDENT = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def _save(folder: Path, raw: Mapping[str, object], tensors: Mapping[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_saved_draft_drafts_the_same(tmp_path: Path, kind: str, prefix: str) -> None:
    pair = make_pair(markov_head_type=kind, **CONFIDENT)
    copies = {
        "embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "lm_head.weight": torch.zeros(VOCAB, HIDDEN),
        "rotary_emb.inv_freq": torch.zeros(3),
    }
    stored = {prefix + name: tensor for name, tensor in {**pair.tensors, **copies}.items()}
    draft = load_dspark(_save(tmp_path / "d", pair.raw, stored), pair.target)
    memory = memory_of(pair)
    tables = opened(memory, "a")
    inject(pair, memory, tables, prompt_of(9), (9,))
    expected, found = (one.block([tables], [5], memory) for one in (pair.draft, draft))
    assert torch.equal(found.logits_BSV, expected.logits_BSV)
    hidden, previous = expected.hidden_BSD[:, 0], torch.tensor([5])
    biases = [one.markov_chain(1).step(previous, hidden) for one in (pair.draft, draft)]
    assert torch.equal(*biases)


def test_names_are_the_published_ones() -> None:
    names = set(make_pair(markov_head_type="gated", **CONFIDENT).tensors)
    assert {name for name in names if not name.startswith("layers.")} == {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "markov_head.gate_proj.weight",
        "markov_head.gate_proj.bias",
        "confidence_head.proj.weight",
        "confidence_head.proj.bias",
    }
    assert {name for name in names if name.startswith("layers.1.self_attn.")} == {
        f"layers.1.self_attn.{part}.weight"
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
    }


def test_missing_surplus_and_ill_shaped_tensors_are_named(tmp_path: Path) -> None:
    pair = make_pair()
    tensors = dict(pair.tensors)
    for name, stored in (
        ("fc.weight", {k: v for k, v in tensors.items() if k != "fc.weight"}),
        ("confidence_head.proj.bias", {**tensors, "confidence_head.proj.bias": torch.zeros(1)}),
        (
            "markov_head.markov_w1.weight",
            {**tensors, "markov_head.markov_w1.weight": torch.ones(2, 5)},
        ),
    ):
        with pytest.raises(CheckpointError, match=name):
            load_dspark(_save(tmp_path / name, pair.raw, stored), pair.target)


def test_the_digest_follows_weights_and_configuration_but_not_the_copies(tmp_path: Path) -> None:
    pair = make_pair()
    tensors = dict(pair.tensors)
    copy = {**tensors, "lm_head.weight": torch.ones(VOCAB, HIDDEN)}
    moved = {**tensors, "norm.weight": tensors["norm.weight"] + 1}
    same, copied, other, causal = (
        load_dspark(_save(tmp_path / str(i), raw, stored), pair.target).digest
        for i, (raw, stored) in enumerate(
            [
                (pair.raw, tensors),
                (pair.raw, copy),
                (pair.raw, moved),
                ({**pair.raw, "is_causal": True}, tensors),
            ]
        )
    )
    assert same == copied
    assert len({same, other, causal}) == 3


def test_a_draft_of_another_target_is_refused_before_its_tensors_are_read(tmp_path: Path) -> None:
    pair = make_pair()
    raw = {**pair.raw, "num_target_layers": 9}
    with pytest.raises(ConfigError, match="num_target_layers is 9"):
        load_dspark(_save(tmp_path / "d", raw, {"x": torch.zeros(1)}), pair.target)
