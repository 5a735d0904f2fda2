"""Loading a folder: single or sharded, tied or not, and every wrong tensor named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.errors import CheckpointError
from sluice.models.llama.load import load_llama
from sluice.models.registry import load_model
from tests.parity.llama_oracle import save_oracle

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_oracle("qwen3", tmp_path_factory.mktemp("model")).folder


def _changed(folder: Path, to: Path, **changes: Tensor | None) -> Path:
    """A copy with tensors (``.`` written as ``__``) replaced, added, or left out."""
    copy = Path(shutil.copytree(folder, to))
    tensors: dict[str, Tensor | None] = dict(load_file(copy / WEIGHTS))
    tensors |= {name.replace("__", "."): value for name, value in changes.items()}
    save_file({n: t for n, t in tensors.items() if t is not None}, copy / WEIGHTS)
    return copy


def test_info_describes_the_checkpoint(folder: Path) -> None:
    info = load_llama(folder).info
    assert info.architecture == "Qwen3ForCausalLM"
    assert (info.ratios, info.window_tokens, info.vocab_size) == ((1, 1, 1), 0, 64)
    assert (info.max_model_tokens, info.eos_token_ids) == (512, (2,))
    assert not info.has_draft
    assert info.tokenizer_digest == ""


def test_the_registry_knows_both_names(folder: Path, tmp_path: Path) -> None:
    for one in (folder, save_oracle("llama", tmp_path).folder):
        loaded = load_model(one)
        assert loaded.draft is None
        assert loaded.target.info == load_llama(one).info


def test_shards_load_like_one_file(folder: Path, tmp_path: Path) -> None:
    save_oracle("qwen3", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert load_llama(tmp_path).info == load_llama(folder).info


def test_a_tied_head_may_be_stored_but_is_not_read(tmp_path: Path) -> None:
    folder = save_oracle("qwen3_tied", tmp_path / "tied").folder
    copy = _changed(
        folder,
        tmp_path / "copy",
        lm_head__weight=torch.zeros(64, 48),
        model__rotary_emb__inv_freq=torch.zeros(8),
    )
    assert load_llama(copy).info == load_llama(folder).info


def test_an_untied_head_must_be_there(folder: Path, tmp_path: Path) -> None:
    copy = _changed(folder, tmp_path / "copy", lm_head__weight=None)
    with pytest.raises(CheckpointError, match=r"'lm_head\.weight' \[64, 48\] is missing"):
        load_llama(copy)


def test_wrong_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    name = "model__layers__1__self_attn__k_norm__weight"
    missing = _changed(folder, tmp_path / "missing", **{name: None})
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_norm\.weight.*missing"):
        load_llama(missing)
    misshapen = _changed(folder, tmp_path / "shape", **{name: torch.ones(8)})
    with pytest.raises(CheckpointError, match=r"k_norm\.weight' has shape \[8\].*\[16\]"):
        load_llama(misshapen)
    bias = {"model__layers__0__self_attn__q_proj__bias": torch.ones(64)}
    with pytest.raises(CheckpointError, match=r"unexpected tensors.*q_proj\.bias"):
        load_llama(_changed(folder, tmp_path / "bias", **bias))


def test_each_digest_sees_its_own_part(folder: Path, tmp_path: Path) -> None:
    base = load_llama(folder).info
    weights = _changed(folder, tmp_path / "weights", model__norm__weight=torch.ones(48))
    assert load_llama(weights).info.weights_digest != base.weights_digest
    assert load_llama(weights).info.config_digest == base.config_digest
    copy = Path(shutil.copytree(folder, tmp_path / "config"))
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-3}))
    (copy / "tokenizer.json").write_text("{}")
    changed = load_llama(copy).info
    assert changed.config_digest != base.config_digest
    assert changed.tokenizer_digest != base.tokenizer_digest
    assert changed.weights_digest == base.weights_digest
