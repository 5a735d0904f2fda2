"""Incremental detokenising: tokens in, text out, never half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from sluice.text.tokenizer import ModelTokenizer


class Detokenizer:
    """Text of one growing answer. All pieces joined equal the full decode, U+FFFD included.

    A token of a byte-level tokenizer stands for the same bytes whatever surrounds it, so bytes go
    through one incremental UTF-8 decoder: constant work a token, and a split character waits.
    """

    def __init__(self, tokenizer: ModelTokenizer, shown: frozenset[int] = frozenset()) -> None:
        """Special tokens among ``shown`` stand for their spelling, all others for nothing."""
        self._tokenizer = tokenizer
        self._shown = shown
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_ids: Sequence[int]) -> str:
        """Text that became complete with these tokens; may be empty."""
        return self._utf8.decode(b"".join(map(self._bytes, token_ids)))

    def finish(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._shown:
            return self._tokenizer.spelled_bytes(token_id)
        return self._tokenizer.token_bytes(token_id)
