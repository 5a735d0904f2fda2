"""One request's place in its grammar, and the tokens that go on from there.

Suffixes: S drafted tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from llguidance import LLMatcher
from torch import Tensor

from sluice.errors import BadRequest, InternalError, SluiceError


class Matcher(Protocol):
    """Follows a request's output; what it is asked about drafts leaves it where it was."""

    @property
    def failure(self) -> SluiceError | None:
        """Why this grammar can't be followed any further; the request must end with it."""
        ...

    def follow(self, output: Sequence[int]) -> None:
        """Take in the tokens of ``output`` that it hasn't yet; so each counts once, whoever made it."""
        ...

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """Bool ``[S + 1, V]``: row i says which tokens may follow the output and the drafts before i."""
        ...


class GrammarMatcher:
    """``Matcher`` over llguidance. The end of a grammar allows the end of sequence and nothing else."""

    def __init__(self, inner: LLMatcher, vocab_size: int, eos_ids: Sequence[int]) -> None:
        self._inner = inner
        self._vocab_size = vocab_size
        self._eos_ids = list(eos_ids)
        self._taken = 0  # tokens of the output
        self.failure: SluiceError | None = None

    def follow(self, output: Sequence[int]) -> None:
        fresh = list(output[self._taken :])
        self._taken = len(output)
        if fresh and self._inner.try_consume_tokens(fresh) < len(fresh) and self.failure is None:
            self.failure = self._reason() or InternalError(
                f"one of tokens {fresh} does not continue the grammar", stage="grammar"
            )

    def allowed(self, drafts: Sequence[int]) -> Tensor:
        """Rows behind a draft that leaves the grammar, or behind its end, are of no use to anybody, and
        allow everything.
        """
        mask_SV = torch.ones(len(drafts) + 1, self._vocab_size, dtype=torch.bool)
        consumed = 0
        mask_SV[0] = self._mask()
        for draft in drafts:
            if self._inner.is_stopped() or self._inner.try_consume_tokens([draft]) == 0:
                break
            consumed += 1
            mask_SV[consumed] = self._mask()
        if consumed:
            self._inner.rollback(consumed)
        return mask_SV

    def _mask(self) -> Tensor:
        bits = np.frombuffer(self._inner.compute_bitmask(), dtype=np.uint8)
        mask_V = torch.from_numpy(np.unpackbits(bits, count=self._vocab_size, bitorder="little"))
        if self._inner.is_error() or not mask_V.any():
            # A failed request must not take down the others of its step: it is given a token to end on.
            self.failure = self.failure or self._reason() or _stuck()
            mask_V = torch.zeros(self._vocab_size, dtype=torch.uint8)
            mask_V[self._eos_ids] = 1
        return mask_V.bool()

    def _reason(self) -> SluiceError | None:
        if not self._inner.is_error():
            return None
        reason = self._inner.get_error().partition("\n")[
            0
        ]  # the rest describes the parser's inside
        return BadRequest(
            f"the grammar can't be followed any further: {reason}",
            field="grammar",
            stage="grammar",
            remedy="simplify it",
        )


def _stuck() -> SluiceError:
    return BadRequest(
        "no token of this model continues the grammar here", field="grammar", stage="grammar"
    )
