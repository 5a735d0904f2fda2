"""Loading a folder: with its draft, without one, and the digests that the gate compares."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from sluice.errors import CheckpointError
from sluice.models.base import ModelInfo
from sluice.models.deepseek_v4.load import load_deepseek_v4
from tests.parity.deepseek_v4_oracle import save_oracle


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_oracle("short_hca", tmp_path_factory.mktemp("model")).folder


def _info(folder: Path, **options: bool) -> ModelInfo:
    return load_deepseek_v4(folder, **options).target.info


def test_info_describes_the_checkpoint(folder: Path) -> None:
    loaded = load_deepseek_v4(folder)
    info = loaded.target.info
    assert loaded.draft is not None
    assert info.has_draft
    assert info.architecture == "DeepseekV4ForCausalLM"
    assert (info.ratios, info.window_tokens, info.vocab_size) == ((16, 4, 0, 16), 16, 256)
    assert info.eos_token_ids == (1,)
    assert info.tokenizer_digest == ""
    assert info == _info(folder)


def test_without_the_draft(folder: Path) -> None:
    loaded = load_deepseek_v4(folder, draft=False)
    assert loaded.draft is None
    assert not loaded.target.info.has_draft
    assert loaded.target.info.draft_digest == ""
    assert loaded.target.info.weights_digest == _info(folder).weights_digest


def test_a_checkpoint_saved_without_draft_tensors(folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    plain = {name: t for name, t in tensors.items() if not name.startswith("mtp.")}
    save_file(plain, copy / "model.safetensors")
    assert load_deepseek_v4(copy).draft is None
    # Half a draft is an error, not a smaller draft.
    half = {name: t for name, t in tensors.items() if name != "mtp.0.enorm.weight"}
    save_file(half, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mtp\.0\.enorm\.weight"):
        load_deepseek_v4(copy)


def test_each_digest_sees_its_own_part(folder: Path, tmp_path: Path) -> None:
    base = _info(folder)
    for part, change in (
        ("weights_digest", "model.norm.weight"),
        ("draft_digest", "mtp.0.norm.weight"),
    ):
        copy = Path(shutil.copytree(folder, tmp_path / part))
        tensors = load_file(copy / "model.safetensors")
        save_file({**tensors, change: tensors[change] + 1}, copy / "model.safetensors")
        assert _differences(base, _info(copy)) == {part}
    copy = Path(shutil.copytree(folder, tmp_path / "config"))
    raw = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**raw, "swiglu_limit": 7.0}))
    (copy / "tokenizer.json").write_text("{}")
    assert _differences(base, _info(copy)) == {"config_digest", "tokenizer_digest"}


def _differences(left: ModelInfo, right: ModelInfo) -> set[str]:
    return {f for f in ModelInfo.__dataclass_fields__ if getattr(left, f) != getattr(right, f)}
