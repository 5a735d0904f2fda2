"""Incremental decoding equals whole decoding and never shows half a character."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from sluice.text.detokenize import Detokenizer
from sluice.text.tokenizer import ModelTokenizer


def _train() -> ModelTokenizer:
    """A byte-level BPE with merges that end inside characters, special and plain added tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<|bos|>", "<|eos|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["日本語 日本 日記 café naïve 😀😁😂 the the theory"] * 20, trainer
    )
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("思考")])
    return ModelTokenizer(tokenizer, [1], 0)


TOKENIZER = _train()
_IDS = st.lists(st.integers(0, TOKENIZER.vocab_size + 3), max_size=40)


def _pieces(token_ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(TOKENIZER)
    bounds = sorted({0, len(token_ids), *(cut % (len(token_ids) + 1) for cut in cuts)})
    pieces = [detokenizer.push(token_ids[start:stop]) for start, stop in pairwise(bounds)]
    return [*pieces, detokenizer.finish()]


@given(_IDS, st.lists(st.integers(0, 100), max_size=10))
def test_pieces_join_to_the_full_decode(token_ids: list[int], cuts: list[int]) -> None:
    assert "".join(_pieces(token_ids, cuts)) == TOKENIZER.decode(token_ids)


@given(st.text(max_size=40))
def test_text_survives_one_token_at_a_time(text: str) -> None:
    token_ids = list(TOKENIZER.encode(text))
    pieces = _pieces(token_ids, list(range(100)))
    assert "".join(pieces) == text
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_half_a_character_waits() -> None:
    token_ids = [
        id_ for id_ in range(TOKENIZER.vocab_size) if TOKENIZER.token_bytes(id_) == b"\xf0"
    ]
    detokenizer = Detokenizer(TOKENIZER)
    assert detokenizer.push(token_ids) == ""
    assert detokenizer.finish() == "\ufffd"


@pytest.mark.parametrize("token", ["<|bos|>", "<|eos|>"])
def test_special_tokens_are_silent(token: str) -> None:
    special = TOKENIZER.encode(token)[-1]
    assert special in TOKENIZER.special_token_ids
    assert Detokenizer(TOKENIZER).push([special]) == ""
