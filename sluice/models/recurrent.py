"""Models whose state can't be rolled back by length: verifying is separate from committing.

A forward that verifies reads a request's recurrent state and never writes it. What it returns must be
closed, by ``commit`` or ``discard``, before the model computes anything else on that memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from sluice.errors import ConfigError
from sluice.layout.component import Component, Kind
from sluice.models.base import ForwardBatch, TargetModel
from sluice.models.capture import HiddenCapture
from sluice.pools.backup import ComponentBackup
from sluice.pools.base import StateMemory

_RECURRENT_KINDS = frozenset({Kind.KDA_CONV, Kind.KDA_RECURRENT})


class PendingVerify(ABC):
    """Verified rows whose state is not settled yet. Single use."""

    @property
    @abstractmethod
    def is_open(self) -> bool: ...

    @abstractmethod
    def commit(self, commit_lens: Sequence[int]) -> None:
        """Move each verified row's state on by its first ``commit_lens[row]`` tokens.

        One item a verified segment, in order: accepted drafts + 1; 0 or -1 leaves the row's slot as it
        is (a finished row). Raises ``IllegalTransition`` if closed already, ``InternalError`` for counts
        that don't fit and for a row whose request has lost its slot; then nothing is written.
        """

    @abstractmethod
    def state_after(self, row: int, tokens: int) -> tuple[ComponentBackup, ...]:
        """The row's recurrent state, every component of it, as it is after its first ``tokens`` tokens,
        which must be accepted ones. Nothing is written. Raises ``IllegalTransition`` if closed.
        """

    @abstractmethod
    def discard(self) -> None:
        """Leave every row's state as it was before the verify. Raises ``IllegalTransition`` if closed."""


class RecurrentTarget(ABC):
    """The contract of a ``TargetModel`` with recurrent state. Nothing has a default, on purpose: a
    wrapper that forgets to hand it on is refused by ``check_contract`` instead of drifting.
    """

    @abstractmethod
    def verify(
        self,
        batch: ForwardBatch,
        memory: StateMemory,
        num_verify: int,
        capture: HiddenCapture | None = None,
    ) -> tuple[Tensor, PendingVerify]:
        """Like ``ReadableTarget.forward``, but the first ``num_verify`` segments only read their state.

        The other segments (prefill chunks of the same batch) move theirs on. Raises
        ``IllegalTransition`` while an earlier verify on ``memory`` is open.
        """


def has_recurrent_state(components: Sequence[Component]) -> bool:
    """Whether some state can't be rolled back by length: told by what is stored, not by model names."""
    return any(component.kind in _RECURRENT_KINDS for component in components)


def check_contract(target: TargetModel, components: Sequence[Component]) -> None:
    """Call at start-up. Raises ``ConfigError`` for recurrent state under a model that can't commit it."""
    if has_recurrent_state(components) and not isinstance(target, RecurrentTarget):
        names = [c.name for c in components if c.kind in _RECURRENT_KINDS]
        raise ConfigError(
            f"{target.info.architecture} keeps recurrent state ({', '.join(names)}), but "
            f"{type(target).__name__} does not implement RecurrentTarget",
            stage="start",
            remedy="derive the model, and every wrapper around it, from RecurrentTarget",
        )
