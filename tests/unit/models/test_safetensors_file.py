"""Reading safetensors: single files, shards, rare dtypes, and damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sluice.errors import CheckpointError
from sluice.models.safetensors_file import open_file, open_folder

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.randn(7).to(torch.bfloat16),
    "c": torch.arange(6).view(2, 3),
    "d": torch.randn(4, 4).to(torch.float8_e4m3fn),
    "e": torch.tensor([0, 127, 200], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "f": torch.tensor([-3, 100], dtype=torch.int8),
    "g": torch.empty(0, 4),
}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_every_dtype_round_trips(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = open_folder(tmp_path)
    assert set(found) == set(TENSORS)
    for name, expected in TENSORS.items():
        actual = found[name].read()
        assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
        assert torch.equal(_bytes(actual), _bytes(expected))


def test_writing_to_a_view_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    open_file(path)["a"].read().zero_()
    assert open_file(path)["a"].read().tolist() == [1, 1, 1, 1]


def test_shards(tmp_path: Path) -> None:
    save_file({"a": TENSORS["a"]}, tmp_path / "one.safetensors")
    save_file({"b": TENSORS["b"]}, tmp_path / "two.safetensors")
    weight_map = {"a": "one.safetensors", "b": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert torch.equal(open_folder(tmp_path)["b"].read(), TENSORS["b"])
    index.write_text(json.dumps({"weight_map": {**weight_map, "c": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'c'.*two\.safetensors"):
        open_folder(tmp_path)
    index.write_text(json.dumps({"weight_map": {**weight_map, "c": "three.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"three\.safetensors"):
        open_folder(tmp_path)


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint.*config\.json"):
        open_folder(tmp_path)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(64)}, path)
    whole = path.read_bytes()
    for damaged in (whole[:-8], b"\xff" * 16, whole[:4], b"", whole[:9] + b"}" + whole[10:]):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            open_file(path)


def test_unknown_dtype_is_named(tmp_path: Path) -> None:
    header = json.dumps({"odd": {"dtype": "Q3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    with pytest.raises(CheckpointError, match=r"'odd'.*'Q3'"):
        open_file(path)
