"""The tokenizer of a model folder: text to ids, ids to bytes, and which ids end an answer."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice.errors import CheckpointError, UnsupportedModel


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in character of every byte (Radford et al. 2019, `bytes_to_unicode`).

    Bytes that print as themselves keep their character; the other 68 take U+0100 onwards, in order.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}


class ModelTokenizer:
    """Byte-level BPE of one model. Immutable; safe to share."""

    def __init__(
        self, tokenizer: Tokenizer, eos_token_ids: Sequence[int], bos_token_id: int | None
    ) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = tuple(eos_token_ids)
        self.bos_token_id = bos_token_id
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._marker_ids = self.special_token_ids | {
            id_ for id_, token in added.items() if re.fullmatch("<.*>", token.content, re.DOTALL)
        }
        self._bytes = _token_bytes(tokenizer)

    @classmethod
    def load(cls, model_dir: Path) -> ModelTokenizer:
        """Read tokenizer.json and what the folder says about bos and eos.

        Raises `CheckpointError` when a file is missing or unreadable, `UnsupportedModel` for a
        tokenizer that is not byte-level.
        """
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{path} is missing", stage="start", remedy="point the model folder at a checkpoint"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path} can't be read: {error}", stage="start") from error
        decoder = read_json(path).get("decoder")
        if not _is_byte_level(decoder):
            raise UnsupportedModel(
                f"{path}: decoder {decoder!r} is not ByteLevel",
                stage="start",
                remedy="only byte-level BPE tokenizers are served",
            )
        config = read_json(model_dir / "tokenizer_config.json")
        return cls(tokenizer, _eos_ids(model_dir, config, tokenizer), _bos_id(config, tokenizer))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Ids of ``text``, with bos in front when the model expects one and it is not there yet.

        Without ``add_special_tokens`` nothing is added: a chat template writes its own bos.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        bos = self.bos_token_id if add_special_tokens else None
        if bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return tuple(ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text at once; without special tokens it is what incremental decoding must equal."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """How the vocabulary spells ``token_id``; empty for an unknown id."""
        return self._tokenizer.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that ``token_id`` adds to the text: none for special and for unknown ids."""
        return self._bytes.get(token_id, b"")

    def spelled_bytes(self, token_id: int) -> bytes:
        """The same, but special tokens stand for their own spelling."""
        return self._bytes.get(token_id) or self.token_text(token_id).encode()

    def marker_ids(self, spellings: Sequence[str]) -> dict[str, int]:
        """Those of ``spellings`` that a grammar can only name by their ids, with these.

        llguidance takes special tokens out of the text, and all added ones that look like <this>.
        """
        ids = {spelling: self._tokenizer.token_to_id(spelling) for spelling in spellings}
        return {text: id_ for text, id_ in ids.items() if id_ in self._marker_ids}


def _token_bytes(tokenizer: Tokenizer) -> dict[int, bytes]:
    """Bytes of every ordinary token. As in the ByteLevel decoder, a token with a character outside
    the byte alphabet (an added one) stands for its own UTF-8 text."""
    alphabet = byte_alphabet()
    added = tokenizer.get_added_tokens_decoder()
    table: dict[int, bytes] = {}
    for token, id_ in tokenizer.get_vocab(with_added_tokens=True).items():
        if id_ in added and added[id_].special:
            continue
        if all(char in alphabet for char in token):
            table[id_] = bytes(alphabet[char] for char in token)
        else:
            table[id_] = token.encode()
    return table


def _is_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    if decoder.get("type") == "Sequence":
        parts = decoder.get("decoders", [])
        return len(parts) == 1 and _is_byte_level(parts[0])
    return decoder.get("type") == "ByteLevel"


def _eos_ids(model_dir: Path, config: dict[str, Any], tokenizer: Tokenizer) -> tuple[int, ...]:
    """generation_config.json wins over config.json, and both over the tokenizer's own eos token."""
    for name in ("generation_config.json", "config.json"):
        ids = read_json(model_dir / name).get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids:
            return tuple(int(id_) for id_ in ids)
    id_ = _token_id(config.get("eos_token"), tokenizer)
    return () if id_ is None else (id_,)


def _bos_id(config: dict[str, Any], tokenizer: Tokenizer) -> int | None:
    if config.get("add_bos_token") is not True:
        return None
    return _token_id(config.get("bos_token"), tokenizer)


def _token_id(token: Any, tokenizer: Tokenizer) -> int | None:
    text = token_text(token)
    id_: int | None = None if text is None else tokenizer.token_to_id(text)
    return id_


def token_text(token: Any) -> str | None:
    """A token of tokenizer_config.json: its text, or an object that holds it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """The object in ``path``; empty when there is none. Raises `CheckpointError`."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}", stage="start") from error
    return content if isinstance(content, dict) else {}
