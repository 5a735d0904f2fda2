"""One set of weights, whichever names and formats a checkpoint stores them in."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice.errors import CheckpointError
from sluice.models.deepseek_v4.config import load_config
from sluice.models.deepseek_v4.names import is_draft, official_name
from sluice.models.deepseek_v4.weights import (
    NextnWeights,
    TargetWeights,
    read_nextn,
    read_target,
)
from sluice.models.loader import Checkpoint
from tests.parity.deepseek_v4_oracle import Oracle, save_oracle

BLOCK_SIZES: dict[str, object] = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "q_lora_rank": 128,
    "head_dim": 64,
    "qk_rope_head_dim": 16,
    "num_attention_heads": 4,
    "o_lora_rank": 128,
    "index_head_dim": 32,
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return save_oracle("short_hca", tmp_path_factory.mktemp("saved"), **BLOCK_SIZES)


def _read(folder: Path) -> tuple[TargetWeights, NextnWeights]:
    config = load_config(folder)
    source = Checkpoint(folder, official_name)
    target = read_target(source, config)
    nextn = read_nextn(source, config, target)
    source.finish()
    return target, nextn


def _tensors(value: object) -> Iterator[Tensor]:
    """All tensors below a weights dataclass, in field order."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name))


def _assert_equal(left: object, right: object) -> None:
    pairs = list(zip(_tensors(left), _tensors(right), strict=True))
    assert len(pairs) > 50
    for a, b in pairs:
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def _rewrite(oracle: Oracle, folder: Path, tensors: dict[str, Tensor]) -> Path:
    (folder / "config.json").write_text((oracle.folder / "config.json").read_text())
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def _published(oracle: Oracle) -> dict[str, Tensor]:
    saved = load_file(oracle.folder / "model.safetensors")
    return {official_name(name): tensor for name, tensor in saved.items()}


def test_published_names(oracle: Oracle, tmp_path: Path) -> None:
    tensors = _published(oracle)
    assert not any(name.startswith("model.") for name in tensors)
    assert "layers.0.attn.kv_norm.weight" in tensors
    assert "hc_head_fn" in tensors
    _assert_equal(_read(_rewrite(oracle, tmp_path, tensors)), _read(oracle.folder))


def test_module_names(oracle: Oracle, tmp_path: Path) -> None:
    drafts = {n: t for n, t in _published(oracle).items() if is_draft(n)}
    module_names = {n: t.clone() for n, t in oracle.target.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in module_names
    folder = _rewrite(oracle, tmp_path, {**module_names, **drafts})
    _assert_equal(_read(folder), _read(oracle.folder))


def test_values_are_the_oracles(oracle: Oracle) -> None:
    target, nextn = _read(oracle.folder)
    layer = oracle.target.model.layers[1]
    attention = target.layers[1].attn
    assert torch.equal(attention.kv_norm, layer.self_attn.kv_norm.weight)
    assert attention.indexer is not None
    indexer = layer.self_attn.compressor.indexer
    assert torch.equal(attention.indexer.compressor.wgate, indexer.gate_proj.weight)
    assert torch.equal(target.layers[1].ffn.w13, layer.mlp.experts.gate_up_proj)
    assert torch.equal(nextn.block.ffn.w2, oracle.nextn.block.mlp.experts.down_proj)
    assert torch.equal(nextn.head.collapse.scale, oracle.nextn.hc_head.hc_scale)
    assert nextn.head.vocabulary is target.head.vocabulary


def test_reduced_precision_keeps_what_must_stay_float32(oracle: Oracle) -> None:
    config = load_config(oracle.folder)
    source = Checkpoint(oracle.folder, official_name, dtype=torch.bfloat16)
    target = read_target(source, config)
    layer = target.layers[1]
    assert layer.attn.compressor is not None
    assert layer.attn.indexer is not None
    kept = (layer.attn_norm, layer.hc_attn, layer.hc_ffn, layer.attn.attn_sink, layer.ffn.gate)
    more = (layer.attn.compressor, layer.attn.indexer.compressor, layer.ffn.bias, target.head)
    assert {t.dtype for t in _tensors((*kept, *more))} == {torch.float32}
    reduced = (layer.attn.wq_b, layer.attn.wo_a, layer.ffn.w13, layer.ffn.shared_w2, target.embed)
    assert {t.dtype for t in reduced} == {torch.bfloat16}


def _quantise(published: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(a checkpoint in the published formats, the same dequantised by hand)."""
    stored, plain = dict(published), dict(published)
    generator = torch.Generator().manual_seed(4)
    for name, tensor in published.items():
        leaf = name.removesuffix(".weight").rsplit(".", 1)[-1]
        scale_name = name.removesuffix(".weight") + ".scale"
        if ".experts." in name:
            rows, cols = tensor.shape
            packed = torch.randint(0, 256, (rows, cols // 2), generator=generator)
            scale = torch.randint(118, 127, (rows, cols // 32), generator=generator)
            stored[name] = packed.to(torch.uint8).view(torch.int8)
            plain[name] = _fp4_by_hand(packed, scale)
        elif leaf in ("wq_a", "wq_b", "wo_a", "wo_b", "e_proj", "h_proj", "w1", "w2", "w3") or (
            leaf == "wkv" and "compressor" not in name
        ):
            rows, cols = tensor.shape
            shape = (-(-rows // 128), -(-cols // 128))
            scale = torch.randint(118, 127, shape, generator=generator)
            factor = 2.0 ** (scale - 127).float()
            values = (tensor * 100).to(torch.float8_e4m3fn)
            stored[name] = values
            spread = torch.kron(factor, torch.ones(128, 128))[:rows, :cols]
            plain[name] = values.float() * spread
        else:
            continue
        stored[scale_name] = scale.to(torch.uint8).view(torch.float8_e8m0fnu)
    return stored, plain


def _fp4_by_hand(packed: Tensor, scale: Tensor) -> Tensor:
    magnitude = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    out = torch.empty(packed.shape[0], 2 * packed.shape[1])
    for parity, codes in enumerate((packed % 16, packed // 16)):
        size = torch.tensor(magnitude)[codes % 8]
        out[:, parity::2] = torch.where(codes >= 8, -size, size)
    return out * torch.kron(2.0 ** (scale - 127).float(), torch.ones(1, 32))


def test_fp8_and_fp4_equal_hand_dequantised(oracle: Oracle, tmp_path: Path) -> None:
    stored, plain = _quantise(_published(oracle))
    for name in ("stored", "plain", "inverse"):
        (tmp_path / name).mkdir()
    quantised = _read(_rewrite(oracle, tmp_path / "stored", stored))
    _assert_equal(quantised, _read(_rewrite(oracle, tmp_path / "plain", plain)))
    # transformers' name for the same scales, in float32 as older checkpoints store them
    renamed = {
        (n.removesuffix("scale") + "weight_scale_inv" if n.endswith(".scale") else n): (
            t.float() if n.endswith(".scale") else t
        )
        for n, t in stored.items()
    }
    assert any(n.endswith("weight_scale_inv") for n in renamed)
    _assert_equal(quantised, _read(_rewrite(oracle, tmp_path / "inverse", renamed)))


def test_sharded_checkpoint(oracle: Oracle, tmp_path: Path) -> None:
    tensors = _published(oracle)
    weight_map = {n: f"part-{i % 3}.safetensors" for i, n in enumerate(tensors)}
    for shard in set(weight_map.values()):
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, tmp_path / shard)
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text((oracle.folder / "config.json").read_text())
    _assert_equal(_read(tmp_path), _read(oracle.folder))


def test_a_lost_and_a_foreign_tensor_are_named(oracle: Oracle, tmp_path: Path) -> None:
    tensors = _published(oracle)
    lost = tensors.pop("layers.1.attn.indexer.wq_b.weight")
    with pytest.raises(CheckpointError, match=r"'layers\.1\.attn\.indexer\.wq_b\.weight'.*missing"):
        _read(_rewrite(oracle, tmp_path, tensors))
    tensors["layers.1.attn.indexer.wq_b.weight"] = lost
    tensors["layers.9.attn.wq_a.weight"] = lost.clone()
    with pytest.raises(CheckpointError, match=r"unexpected.*'layers\.9\.attn\.wq_a\.weight'"):
        _read(_rewrite(oracle, tmp_path, tensors))
