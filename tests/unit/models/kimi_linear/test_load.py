"""Loading a folder: what the gate compares, and what is said about tensors at fault."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sluice.errors import CheckpointError, UnsupportedModel
from sluice.models.base import ModelInfo
from sluice.models.kimi_linear.load import load_kimi_linear
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.models.registry import load_model
from tests.parity.kimi_linear_oracle import save_oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_oracle("plain", tmp_path_factory.mktemp("model")).folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def test_info_describes_the_checkpoint(folder: Path) -> None:
    info = load_kimi_linear(folder).info
    assert info.architecture == "KimiLinearForCausalLM"
    assert (info.ratios, info.window_tokens, info.vocab_size) == ((0, 0, 0, 1, 0), 0, 256)
    assert (info.eos_token_ids, info.max_model_tokens) == ((1,), 4096)
    assert (info.has_draft, info.draft_digest, info.tokenizer_digest) == (False, "", "")
    assert info == load_kimi_linear(folder).info


def test_the_registry_knows_it(folder: Path) -> None:
    loaded = load_model(folder)
    assert isinstance(loaded.target, KimiLinearTarget)
    assert loaded.draft is None


def test_each_digest_sees_its_own_part(folder: Path, copy: Path) -> None:
    base = load_kimi_linear(folder).info
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.self_attn.A_log"
    save_file({**tensors, name: tensors[name] + 1}, copy / "model.safetensors")
    assert _differences(base, load_kimi_linear(copy).info) == {"weights_digest"}
    save_file(tensors, copy / "model.safetensors")
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "rms_norm_eps": 1e-6}))
    (copy / "tokenizer.json").write_text("{}")
    assert _differences(base, load_kimi_linear(copy).info) == {"config_digest", "tokenizer_digest"}


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.dt_bias", "model.layers.3.self_attn.kv_b_proj.weight"]
)
def test_tensors_at_fault_are_named(copy: Path, name: str) -> None:
    tensors = load_file(copy / "model.safetensors")
    short = name.removeprefix("model.").replace(".", r"\.")
    save_file({n: t for n, t in tensors.items() if n != name}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{short}.* is missing"):
        load_kimi_linear(copy)
    save_file({**tensors, name: tensors[name][:-1].clone()}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{short}.* has shape"):
        load_kimi_linear(copy)
    extra = name.replace("dt_bias", "extra").replace("kv_b_proj", "extra")
    save_file({**tensors, extra: tensors[name].clone()}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="1 unexpected tensors"):
        load_kimi_linear(copy)


def test_a_kimi_k3_folder_is_refused(copy: Path) -> None:
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "gate_lower_bound": -5}))
    with pytest.raises(UnsupportedModel, match="gate_lower_bound"):
        load_model(copy)


def _differences(left: ModelInfo, right: ModelInfo) -> set[str]:
    return {f for f in ModelInfo.__dataclass_fields__ if getattr(left, f) != getattr(right, f)}
