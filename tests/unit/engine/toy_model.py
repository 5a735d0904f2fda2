"""A tiny deterministic language model over real memory: integer state, so equality is exact in any
batching.

The next token depends on the last W tokens, on every closed block of four and on nothing else,
through rows in the pools. A row that was never written is NaN (``fill="nan"``) and makes the
forward raise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from sluice.config import EngineConfig, PoolConfig, PoolMode, SpecConfig
from sluice.engine.core import EngineCore
from sluice.grammar.compiler import NO_GRAMMARS, Grammars
from sluice.layout.component import Coverage, Kind, Owner
from sluice.layout.span import pair_runs, physical_row, span
from sluice.models.base import DraftModel, ForwardBatch, ModelInfo
from sluice.pools.base import BufferSpec, RequestTables, StateMemory
from sluice.pools.memory import Memory, build_memory
from sluice.types import Request, RequestId, Role, Sampling

VOCAB, WINDOW, RATIO, MODULUS = 11, 8, 4, 4093
EOS = 0


def _spec(
    name: str, owner: Owner, kind: Kind, coverage: Coverage, row: int, window: int, width: int = 1
) -> BufferSpec:
    return BufferSpec(name, owner, kind, coverage, row, window, (0,), "float32", (width,))


TARGET_NEEDS = (
    _spec("target.c4", Owner.TARGET, Kind.C4, Coverage.HISTORY, RATIO, 0),
    _spec("target.swa", Owner.TARGET, Kind.SWA, Coverage.WINDOW, 1, WINDOW),
    _spec("target.tail", Owner.TARGET, Kind.C128_TAIL, Coverage.OPEN_BLOCK, 1, RATIO),
)
DRAFT_NEEDS = (
    _spec("draft.swa", Owner.DRAFT, Kind.SWA, Coverage.WINDOW, 1, WINDOW),
    _spec("draft.hidden", Owner.DRAFT, Kind.HIDDEN, Coverage.LAST, 1, 0, 2),
)


class _Rows:
    """One component of one request, read and written by logical row."""

    def __init__(self, memory: StateMemory, name: str, tables: RequestTables) -> None:
        name = memory.window_name(name)
        self._component = memory.component(name)
        self._buffer = memory.buffer(name, 0)
        self._tables = tables

    def get(self, ordinal: int) -> int:
        value = float(self._buffer[physical_row(self._component, self._tables, ordinal), 0])
        return int(value)  # raises for NaN

    def put(self, ordinal: int, value: int) -> None:
        self._buffer[physical_row(self._component, self._tables, ordinal), 0] = float(value)


def mix(*values: int) -> int:
    mixed = 17
    for value in values:
        mixed = (mixed * 31 + value * 7 + 3) % MODULUS
    return mixed


def _table(seed: int) -> Tensor:
    return torch.randn(MODULUS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


class ToyTarget:
    """Hidden rows are ``[state, token]``."""

    def __init__(self) -> None:
        self._logits = _table(1)
        self.forwards = 0
        self.before_forward: Callable[[ForwardBatch], None] | None = None

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            architecture="toy",
            config_digest="c",
            weights_digest="w",
            tokenizer_digest="t",
            vocab_size=VOCAB,
            max_model_tokens=4096,
            window_tokens=WINDOW,
            ratios=(RATIO,),
            eos_token_ids=(EOS,),
            has_draft=True,
            draft_digest="d",
        )

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return TARGET_NEEDS

    def forward(self, batch: ForwardBatch, memory: StateMemory) -> Tensor:
        self.forwards += 1
        if self.before_forward is not None:
            self.before_forward(batch)
        hidden = [
            row
            for s in batch.segments
            for row in self._segment(memory, s.tables, s.start, s.token_ids)
        ]
        return torch.tensor(hidden, dtype=torch.float32)

    def _segment(
        self, memory: StateMemory, tables: RequestTables, start: int, ids: Sequence[int]
    ) -> list[list[int]]:
        assert start == tables.kv_len
        swa, tail, c4 = (
            _Rows(memory, n, tables) for n in ("target.swa", "target.tail", "target.c4")
        )
        window = {p: swa.get(p) for p in range(max(0, start - WINDOW + 1), start)}
        block = {p: tail.get(p) for p in range(RATIO * (start // RATIO), start)}
        hidden = []
        for p, token in enumerate(ids, start):
            window[p] = mix(token, p)
            block[p] = token + 1
            swa.put(p, window[p])
            tail.put(p, block[p])
            if (p + 1) % RATIO == 0:
                c4.put(p // RATIO, mix(*(block[q] for q in range(p - RATIO + 1, p + 1))))
            seen = [window[q] for q in range(max(0, p - WINDOW + 1), p + 1)]
            history = [c4.get(w) for w in range((p + 1) // RATIO)]
            hidden.append([mix(*seen, *history), token])
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._logits[hidden[:, 0].long()]


class ToyDraft:
    """A window-only draft: row t mixes the target's state at t with token t + 1; sees its own last
    W rows.
    """

    def __init__(self, logits: Tensor | None = None) -> None:
        self.table = _table(2) if logits is None else logits

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return DRAFT_NEEDS

    def row(self, hidden_D: Tensor, token: int) -> int:
        return mix(int(hidden_D[0]), token)

    def forward(self, batch: ForwardBatch, hidden: Tensor, memory: StateMemory) -> Tensor:
        out, at = [], 0
        for s in batch.segments:
            swa = _Rows(memory, "draft.swa", s.tables)
            low = s.tables.draft_valid_from
            rows = {p: swa.get(p) for p in range(max(low, s.start - WINDOW + 1), s.start)}
            for p, token in enumerate(s.token_ids, s.start):
                rows[p] = self.row(hidden[at], token)
                swa.put(p, rows[p])
                seen = [rows[q] for q in range(max(low, p - WINDOW + 1), p + 1)]
                out.append([mix(*seen), p])
                at += 1
        return torch.tensor(out, dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.table[hidden[:, 0].long()]


class OracleDraft:
    """Knows every request's true continuation, and says it where ``right(position)`` holds, else
    something else.

    ``truth[request_id]`` holds prompt and output. Hidden rows are ``[request number, position]``.
    """

    def __init__(
        self,
        truth: Mapping[RequestId, Sequence[int]],
        right: Callable[[int], bool],
        *,
        vocab_size: int = VOCAB,
        needs: Sequence[BufferSpec] = DRAFT_NEEDS,
    ) -> None:
        self._vocab_size, self._needs = vocab_size, tuple(needs)
        self._ids = list(truth)
        self._truth = truth
        self._right = right

    def state_needs(self, kv_dtype: str) -> tuple[BufferSpec, ...]:
        return self._needs

    def forward(self, batch: ForwardBatch, hidden: Tensor, memory: StateMemory) -> Tensor:
        rows = [
            [self._ids.index(s.tables.request_id), p]
            for s in batch.segments
            for p in range(s.start, s.stop)
        ]
        return torch.tensor(rows, dtype=torch.float32)

    def logits(self, hidden: Tensor) -> Tensor:
        out = torch.zeros(len(hidden), self._vocab_size)
        for i, (number, row) in enumerate(hidden.long().tolist()):
            truth, position = self._truth[self._ids[number]], row + 2
            token = truth[position] if position < len(truth) else 0
            out[i, token if self._right(position) else (token + 1) % self._vocab_size] = 1.0
        return out


def pool_config(mode: PoolMode = PoolMode.PAGED, *, num_slots: int = 8) -> PoolConfig:
    return PoolConfig(
        mode=mode,
        page_tokens=16,
        num_pages=64,
        num_window_pages=80,
        num_slots=num_slots,
        fill="nan",
    )


def toy_core(
    role: Role = Role.AGGREGATED,
    mode: PoolMode = PoolMode.PAGED,
    *,
    steps: int = 3,
    draft: DraftModel | None = None,
    target: ToyTarget | None = None,
    config: EngineConfig | None = None,
    pool: PoolConfig | None = None,
    grammars: Grammars = NO_GRAMMARS,
) -> EngineCore:
    """A toy engine; ``steps=0`` runs without a draft."""
    target = target or ToyTarget()
    draft = draft or ToyDraft()
    spec = SpecConfig(steps)
    pool = pool or pool_config(mode)
    needs = (*target.state_needs(pool.kv_dtype), *draft.state_needs(pool.kv_dtype))
    memory = build_memory(needs, pool, spec.verify_tokens)
    return EngineCore(
        role,
        target,
        draft if steps else None,
        memory,
        spec,
        config or EngineConfig(),
        pool,
        grammars,
    )


def request(name: str, prompt: Sequence[int], **sampling: object) -> Request:
    chosen = Sampling(**{"max_tokens": 12, "ignore_eos": True, **sampling})  # type: ignore[arg-type]
    return Request(RequestId(name), tuple(prompt), chosen)


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed * 1000 + length)
    return tuple(torch.randint(1, VOCAB, (length,), generator=generator).tolist())


def copy_state(
    source: Memory,
    src: RequestTables,
    target: Memory,
    dst: RequestTables,
    length: int,
    *,
    with_draft: bool = True,
    skip: str = "",
) -> None:
    """What a transfer does, component by component: live rows of a prompt, row by row."""
    for component in source.components():
        if component.name == skip or (component.owner is Owner.DRAFT and not with_draft):
            continue
        twin = target.component(component.name)
        pairs = pair_runs(span(component, src, length), span(twin, dst, length))
        for entry in component.entries:
            a = source.buffer(component.name, entry.layer_id)
            b = target.buffer(component.name, entry.layer_id)
            for first, to, count in pairs:
                b[to : to + count] = a[first : first + count]
