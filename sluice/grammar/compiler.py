"""From a grammar's text to a matcher, over the tokenizer of the model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from sluice.errors import BadRequest
from sluice.grammar.language import refused, to_llguidance
from sluice.grammar.matcher import GrammarMatcher, Matcher
from sluice.types import Grammar


class Grammars(Protocol):
    """What an engine asks for matchers."""

    def matcher(self, grammar: Grammar) -> Matcher | None:
        """A matcher at the grammar's start; None where another rank chooses the tokens. May take long, and may
        be called on any thread.

        Raises ``BadRequest`` that says what is wrong with the text.
        """
        ...


class GrammarCompiler:
    """``Grammars`` of one vocabulary."""

    def __init__(self, tokenizer: LLTokenizer, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_ids = tuple(eos_ids)

    def matcher(self, grammar: Grammar) -> Matcher:
        inner = LLMatcher(
            self._tokenizer,
            to_llguidance(grammar),
            log_level=0,
            limits=LLParserLimits(verbose_errors=False),  # their text would quote prompts into logs
        )
        if inner.is_error():
            raise refused(inner.get_error().strip())
        return GrammarMatcher(inner, self._vocab_size, self._eos_ids)


@dataclass(frozen=True)
class NoGrammars:
    """``Grammars`` of a model that can't follow any."""

    reason: str

    def matcher(self, grammar: Grammar) -> Matcher:
        raise BadRequest(f"this model can't follow grammars: {self.reason}", field="grammar")


class FollowersGrammars:
    """``Grammars`` of a rank that takes rank 0's tokens: it compiles none, and holds up nobody's step."""

    def matcher(self, grammar: Grammar) -> None:
        return None


NO_GRAMMARS: Grammars = NoGrammars("the engine was built without a tokenizer")


def grammars_of(model_dir: Path, vocab_size: int, eos_ids: Sequence[int]) -> Grammars:
    """Those a model's folder allows: with a ``tokenizer.json`` and an end of sequence all, else none.

    Takes seconds for a vocabulary of 130,000, during which no other thread gets to run: call it before
    anybody waits for this process.
    """
    file = model_dir / "tokenizer.json"
    if not file.is_file():
        return NoGrammars("its folder has no tokenizer.json")
    if not eos_ids:
        return NoGrammars("its configuration names no end of sequence")
    try:
        tokenizer = LLTokenizer(str(file), n_vocab=vocab_size, eos_token=list(eos_ids))
    except ValueError as error:
        return NoGrammars(f"its tokenizer.json can't be used for them: {error}")
    return GrammarCompiler(tokenizer, vocab_size, eos_ids)
