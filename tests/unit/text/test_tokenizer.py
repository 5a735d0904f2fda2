"""Loading a tokenizer folder: bos, eos, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.errors import CheckpointError, UnsupportedModel
from sluice.text.tokenizer import ModelTokenizer, byte_alphabet


def _write(folder: Path, decoder: Any = None, **config: Any) -> Path:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel() if decoder is None else decoder
    trainer = trainers.BpeTrainer(
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["some words"], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_byte_alphabet_is_the_librarys_own() -> None:
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


def test_bos_is_added_once_where_wanted(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(_write(tmp_path, add_bos_token=True, bos_token="<s>"))
    assert tokenizer.encode("some")[0] == 0
    assert tokenizer.encode("<s>some") == tokenizer.encode("some")
    assert tokenizer.encode("") == (0,)


def test_no_bos_on_top_of_a_chat_templates_own(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(_write(tmp_path, add_bos_token=True, bos_token="<s>"))
    assert tokenizer.encode("<s>some", add_special_tokens=False) == tokenizer.encode("some")
    assert 0 not in tokenizer.encode("some", add_special_tokens=False)


def test_special_tokens_in_the_decoded_text_on_request(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(_write(tmp_path, add_bos_token=True, bos_token="<s>"))
    ids = tokenizer.encode("some é")
    assert tokenizer.decode(ids) == "some é"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<s>some é"
    assert tokenizer.token_text(0) == "<s>"
    assert tokenizer.token_text(99_999) == ""


def test_no_bos_where_the_folder_does_not_ask_for_it(tmp_path: Path) -> None:
    tokenizer = ModelTokenizer.load(_write(tmp_path, add_bos_token=False, bos_token="<s>"))
    assert tokenizer.encode("") == ()
    assert tokenizer.bos_token_id is None


@pytest.mark.parametrize(("ids", "expected"), [(7, (7,)), ([7, 9], (7, 9))])
def test_generation_config_names_eos(
    tmp_path: Path, ids: int | list[int], expected: tuple[int, ...]
) -> None:
    _write(tmp_path, eos_token="</s>")
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 3}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert ModelTokenizer.load(tmp_path).eos_token_ids == expected


def test_eos_falls_back_to_the_token(tmp_path: Path) -> None:
    folder = _write(tmp_path, eos_token={"content": "</s>", "special": True})
    assert ModelTokenizer.load(folder).eos_token_ids == (1,)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        ModelTokenizer.load(tmp_path)


def test_broken_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json can't be read"):
        ModelTokenizer.load(tmp_path)


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="not ByteLevel"):
        ModelTokenizer.load(_write(tmp_path, decoders.Metaspace()))
