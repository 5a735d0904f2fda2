"""From a grammar's text to a matcher, over the tokenizer of the model's folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sluice.errors import BadRequest
from sluice.grammar.language import refused, to_llguidance
from sluice.grammar.matcher import GrammarMatcher, Matcher
from sluice.types import Grammar


class Grammars(Protocol):
    """What an engine asks for matchers."""

    def matcher(self, grammar: Grammar) -> Matcher:
        """A matcher at the grammar's start; may take long, and may be called on any thread.

        Raises ``BadRequest`` that says what is wrong with the text.
        """
        ...


class GrammarCompiler:
    """``Grammars`` of one vocabulary.

    The first grammar pays for the tokenizer's trie (seconds for a vocabulary of 130,000), so pods that never
    see one don't.
    """

    def __init__(
        self, load: Callable[[], LLTokenizer], vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._load = load
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def matcher(self, grammar: Grammar) -> Matcher:
        inner = LLMatcher(
            self._ready_tokenizer(),
            to_llguidance(grammar),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),  # their text would quote prompts into logs
        )
        if inner.is_error():
            raise refused(inner.get_error().strip())
        return GrammarMatcher(inner, self._vocab_size, self._eos_ids)

    def _ready_tokenizer(self) -> LLTokenizer:
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._load()
            return self._tokenizer


class _NoGrammars:
    def matcher(self, grammar: Grammar) -> Matcher:
        raise BadRequest(
            "this model can't follow grammars: its folder has no tokenizer.json, or its configuration "
            "no end of sequence",
            field="grammar",
        )


NO_GRAMMARS: Grammars = _NoGrammars()


def grammars_of(model_dir: Path, vocab_size: int, eos_ids: Sequence[int]) -> Grammars:
    """Those a model's folder allows: with a ``tokenizer.json`` and an end of sequence all, else none."""
    file = model_dir / "tokenizer.json"
    if not file.is_file() or not eos_ids:
        return NO_GRAMMARS
    return GrammarCompiler(
        lambda: LLTokenizer(str(file), n_vocab=vocab_size, eos_token=list(eos_ids)),
        vocab_size,
        eos_ids,
    )
