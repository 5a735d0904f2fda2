"""Kimi Linear against transformers: every schedule of a prompt gives one-shot logits."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sluice.models.capture import HiddenCapture
from sluice.models.kimi_linear.load import load_kimi_linear
from sluice.models.kimi_linear.model import KimiLinearTarget
from sluice.pools.base import RequestTables
from tests.parity.kimi_linear_oracle import VALUE_DIM, VARIANTS, Oracle, save_oracle
from tests.unit.models.kimi_linear.tiny import VERIFY_TOKENS, Driver

TOLERANCE = 1e-4
LONGEST = 150
# Shorter than the convolution, around a chunk of the recurrence, a page and a block of keys.
BOUNDARIES = (1, 2, 3, 4, 5, 15, 16, 17, 33, 127, 128, 129)


@dataclass(frozen=True)
class Case:
    """A model, its oracle, one token sequence, and the truth about it."""

    oracle: Oracle
    target: KimiLinearTarget
    ids: tuple[int, ...]
    logits: Tensor


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    oracle = save_oracle(request.param, tmp_path_factory.mktemp(request.param))
    ids = torch.randint(0, 256, (LONGEST,), generator=torch.Generator().manual_seed(7)).tolist()
    return Case(oracle, load_kimi_linear(oracle.folder), tuple(ids), oracle.logits(ids))


class Checked:
    """Requests that read the case's tokens, with every committed row held to the truth."""

    def __init__(self, case: Case, **options: object) -> None:
        self.case = case
        self.driver = Driver(case.target, num_slots=14, **options)  # type: ignore[arg-type]
        self.error = 0.0

    def next(self, tables: RequestTables, count: int) -> tuple[int, ...]:
        return self.case.ids[tables.kv_len : min(LONGEST, tables.kv_len + count)]

    def feed(self, steps: list[tuple[RequestTables, int]]) -> None:
        """The next ``count`` true tokens of each request, in one batch."""
        starts = [tables.kv_len for tables, _ in steps]
        ids = [(tables, self.next(tables, count)) for tables, count in steps]
        logits = self.driver.feed(ids).split([len(one) for _, one in ids])
        for start, rows in zip(starts, logits, strict=True):
            self._compare(start, rows)

    def verify(self, steps: list[tuple[RequestTables, int]]) -> None:
        """Each request's anchor and drafts, of which so many are right; those are committed."""
        ids = []
        for tables, accepted in steps:
            right = self.next(tables, accepted + 1)
            wrong = [(token + 1) % 256 for token in self.case.ids[: VERIFY_TOKENS - len(right)]]
            ids.append((tables, (*right, *wrong)))
        logits, pending = self.driver.verify(ids)
        pending.commit([accepted + 1 for _, accepted in steps])
        for (tables, accepted), rows in zip(steps, logits.split(VERIFY_TOKENS), strict=True):
            self._compare(tables.kv_len, rows[: accepted + 1])
            tables.kv_len += accepted + 1

    def close(self, requests: list[RequestTables]) -> None:
        for tables in requests:
            self.driver.memory.close(tables)
        self.driver.memory.check()
        assert self.driver.memory.at_baseline()

    def _compare(self, start: int, rows: Tensor) -> None:
        truth = self.case.logits[start : start + len(rows)]
        assert torch.equal(rows.argmax(-1), truth.argmax(-1))
        self.error = max(self.error, (rows - truth).abs().max().item())


def test_one_shot_then_decode_and_verify(case: Case) -> None:
    """All boundary lengths in one ragged batch; then single tokens, then blocks of drafts."""
    checked = Checked(case)
    requests = [checked.driver.open() for _ in BOUNDARIES]
    checked.feed(list(zip(requests, BOUNDARIES, strict=True)))
    checked.feed([(one, 1) for one in requests])
    for turn in range(VERIFY_TOKENS):
        counts = [(i + turn) % VERIFY_TOKENS for i in range(len(requests))]
        checked.verify(list(zip(requests, counts, strict=True)))
    checked.feed([(one, 1) for one in requests])
    assert checked.error <= TOLERANCE
    checked.close(requests)


def test_chunk_sizes_side_by_side(case: Case) -> None:
    """Chunks of 1, 2, 3, 7 and 33, each in one batch with all the others."""
    checked = Checked(case)
    sizes = (1, 2, 3, 7, 33)
    requests = [checked.driver.open() for _ in sizes]
    for _ in range(20):
        steps = zip(requests, sizes, strict=True)
        checked.feed([(one, size) for one, size in steps if one.kv_len < LONGEST])
    assert [one.kv_len for one in requests] == [20, 40, 60, 140, LONGEST]
    assert checked.error <= TOLERANCE
    checked.close(requests)


def test_a_recycled_slot_starts_from_nothing(case: Case) -> None:
    checked = Checked(case)
    for count in (40, 2):
        tables = checked.driver.open()
        assert tables.slot == 1
        checked.feed([(tables, count)])
        checked.feed([(tables, 1)])
        checked.close([tables])
    assert checked.error <= TOLERANCE


def test_captured_streams_are_those_between_layers(case: Case) -> None:
    """After each layer and before the final norm, in the order asked for."""
    driver = Driver(case.target)
    tables = driver.open()
    capture = HiddenCapture((3, 0))
    ids = case.ids[:2]  # fewer than are computed side by side
    case.target.forward(driver.batch([(tables, ids)]), driver.memory, capture)
    streams: list[Tensor] = []
    hooks = [
        case.oracle.target.model.layers[layer].register_forward_hook(
            lambda _module, _inputs, output: streams.append(output)
        )
        for layer in (0, 3)
    ]
    case.oracle.logits(list(ids))
    for hook in hooks:
        hook.remove()
    expected = torch.cat((streams[1][0], streams[0][0]), dim=-1)
    torch.testing.assert_close(capture.hidden(), expected, rtol=1e-4, atol=TOLERANCE)


def test_bfloat16_stays_close(case: Case) -> None:
    """Reduced precision end to end: parameters that must stay float32 do, and nothing overflows."""
    target = load_kimi_linear(case.oracle.folder, dtype=torch.bfloat16)
    driver = Driver(target, kv_dtype="bfloat16")
    tables = driver.open()
    rows = [driver.feed([(tables, case.ids[:90])]), driver.feed([(tables, case.ids[90:91])])]
    actual = torch.cat(rows)
    assert actual.dtype == torch.float32
    agreement = (actual.argmax(-1) == case.logits[:91].argmax(-1)).float().mean().item()
    assert agreement > 0.8
    state = driver.state(tables)
    assert (state.conv.dtype, state.recurrent.dtype) == (torch.bfloat16, torch.float32)


def test_greedy_text_equals_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Against its own cached decoding, from a prompt shorter than the convolution."""
    oracle = save_oracle("plain", tmp_path_factory.mktemp("greedy"), seed=3)
    driver = Driver(load_kimi_linear(oracle.folder))
    prompt = [17, 200]
    tables = driver.open()
    ids, tokens = tuple(prompt), []
    for _ in range(12):
        ids = (int(driver.feed([(tables, ids)])[-1].argmax()),)
        tokens += ids
    assert tokens == oracle.greedy(prompt, 12)


def test_wide_states_are_not_square(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The variant that would show a transposed state really has one."""
    oracle = save_oracle("wide", tmp_path_factory.mktemp("shape"))
    shape = load_kimi_linear(oracle.folder).config.kda
    assert (shape.key_dim, shape.value_dim) == (16, VALUE_DIM)
    assert shape.key_dim != shape.value_dim
