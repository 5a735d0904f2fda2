"""A checkpoint gives exactly the tensors asked for, or a sentence that names the one at fault."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice.errors import CheckpointError
from sluice.models.loader import Checkpoint


def _open(folder: Path, tensors: dict[str, torch.Tensor], **options: torch.dtype) -> Checkpoint:
    save_file(tensors, folder / "model.safetensors")
    return Checkpoint(folder, lambda name: name.removeprefix("model."), **options)


def test_renames_casts_and_keeps_wide(tmp_path: Path) -> None:
    source = _open(
        tmp_path, {"model.w.weight": torch.ones(2, 3), "n": torch.ones(3)}, dtype=torch.bfloat16
    )
    assert source.has("w.weight")
    assert source.take("w.weight", (2, 3)).dtype == torch.bfloat16
    assert source.take("n", (3,), wide=True).dtype == torch.float32
    source.finish()


def test_missing_names_tensor_and_shape(tmp_path: Path) -> None:
    source = _open(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"'b' \[4, 5\] is missing.*shards"):
        source.take("b", (4, 5))


def test_ill_shaped_names_both_shapes(tmp_path: Path) -> None:
    source = _open(tmp_path, {"a": torch.ones(2, 3), "ids": torch.ones(3)})
    with pytest.raises(CheckpointError, match=r"'a' has shape \[2, 3\].*\[3, 2\]"):
        source.take("a", (3, 2))
    with pytest.raises(CheckpointError, match=r"'ids' is torch.float32, expected integers"):
        source.take_ids("ids", (3,))


def test_unexpected_are_listed_unless_excused(tmp_path: Path) -> None:
    source = _open(tmp_path, {name: torch.ones(1) for name in "abcdefg"})
    source.take("a", (1,))
    with pytest.raises(CheckpointError, match=r"6 unexpected.*'b', 'c', 'd', 'e', \.\.\."):
        source.finish()
    source.finish(ignore=lambda name: name != "a")


def test_two_spellings_of_one_tensor(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'model\.a'.*'a'|'a'.*'model\.a'"):
        _open(tmp_path, {"model.a": torch.ones(1), "a": torch.ones(1)})


def test_quantised_needs_its_scale_in_the_right_shape(tmp_path: Path) -> None:
    stored = torch.ones(130, 64).to(torch.float8_e4m3fn)
    source = _open(tmp_path, {"w.weight": stored})
    with pytest.raises(CheckpointError, match=r"'w\.scale' \[2, 1\] is missing"):
        source.take("w.weight", (130, 64))
    source = _open(tmp_path, {"w.weight": stored, "w.scale": torch.ones(1, 1)})
    with pytest.raises(CheckpointError, match=r"'w\.scale' has shape \[1, 1\].*\[2, 1\]"):
        source.take("w.weight", (130, 64))
    packed = torch.zeros(4, 16, dtype=torch.int8)
    source = _open(tmp_path, {"w.weight": packed, "w.scale": torch.ones(4, 1)})
    with pytest.raises(CheckpointError, match=r"'w\.weight' has shape \[4, 32\].*\[4, 16\]"):
        source.take("w.weight", (4, 16))


def test_digest_sees_one_changed_bit_name_or_shape(tmp_path: Path) -> None:
    base = _open(tmp_path, {"a": torch.ones(4), "b": torch.ones(2)})
    same = _open(tmp_path, {"model.a": torch.ones(4), "b": torch.ones(2)})
    assert base.digest() == same.digest()
    for other in (
        {"a": torch.ones(4) * (1 + 2**-23), "b": torch.ones(2)},
        {"c": torch.ones(4), "b": torch.ones(2)},
        {"a": torch.ones(2, 2), "b": torch.ones(2)},
    ):
        assert _open(tmp_path, other).digest() != base.digest()
    changed_a = _open(tmp_path, {"a": torch.zeros(4), "b": torch.ones(2)})
    assert changed_a.digest(lambda name: name == "b") == base.digest(lambda name: name == "b")
