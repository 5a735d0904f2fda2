"""A vocabulary as small as the toy model's, whose tokens have text: some texts have several spellings."""

from __future__ import annotations

from collections.abc import Sequence

from llguidance import LLTokenizer, TokenizerWrapper

from sluice.grammar.compiler import GrammarCompiler

EOS = 0
TEXTS = ("", "a", "b", "c", "ab", "bc", "0", "1", ",", "[", "]")


class _Spelling:
    eos_token_id = EOS
    bos_token_id = None
    tokens = (b"<eos>", *(text.encode() for text in TEXTS[1:]))
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        ids: list[int] = []
        while text:
            fitting = [i for i, token in enumerate(self.tokens) if i and text.startswith(token)]
            best = max(fitting, key=lambda i: len(self.tokens[i]), default=None)
            if best is not None:
                ids.append(best)
            text = text[1 if best is None else len(self.tokens[best]) :]
        return ids


def load_letters() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Spelling()), eos_token=[EOS])


def letters() -> GrammarCompiler:
    return GrammarCompiler(load_letters(), len(TEXTS), (EOS,))


def text_of(ids: Sequence[int]) -> str:
    return "".join(TEXTS[i] for i in ids)
