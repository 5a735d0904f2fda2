"""The pooled forward against transformers: every schedule of a prompt gives one-shot logits."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from sluice.config import PoolMode
from sluice.models.deepseek_v4.load import LoadedDeepseekV4, load_deepseek_v4
from tests.parity.deepseek_v4_oracle import TINY, VARIANTS, Oracle, save_oracle
from tests.parity.deepseek_v4_serving import VERIFY_TOKENS, Served, Serving, Step, error

TOLERANCE = 1e-4
WINDOW = int(TINY["sliding_window"])  # type: ignore[call-overload]
BOUNDARIES = (*range(1, 10), WINDOW - 1, WINDOW, WINDOW + 1, *range(127, 131), 255, 256, 257, 513)
LONGEST = 530
_STEPS = 22  # 7 * 22 > 128, 22 > W; the longer boundaries are approached by one larger chunk


@dataclass(frozen=True)
class Case:
    """A model, its oracle, one token sequence, and the truth about it."""

    oracle: Oracle
    model: LoadedDeepseekV4
    ids: list[int]
    streams: Tensor
    logits: Tensor


@pytest.fixture(scope="module", params=sorted(VARIANTS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    torch.set_num_threads(1)
    oracle = save_oracle(request.param, tmp_path_factory.mktemp(request.param))
    ids = torch.randint(0, 256, (LONGEST,), generator=torch.Generator().manual_seed(7)).tolist()
    streams, logits = oracle.streams_and_logits(ids)
    return Case(oracle, load_deepseek_v4(oracle.folder), ids, streams, logits)


@pytest.fixture(params=list(PoolMode), ids=lambda mode: mode.value)
def mode(request: pytest.FixtureRequest) -> PoolMode:
    return request.param  # type: ignore[no-any-return]


def _feed(case: Case, request: Served, count: int) -> Step:
    """The next ``count`` true tokens, all committed."""
    return Step(request, case.ids[request.length : request.length + count], count)


def _guess(case: Case, request: Served, accepted: int, rng: random.Random) -> Step:
    """A verify block: the newest token and drafts, the first ``accepted`` drafts right, the rest not."""
    start = request.length
    right = case.ids[start : start + 1 + accepted]
    wrong = [rng.randrange(256) for _ in range(VERIFY_TOKENS - len(right))]
    return Step(request, [*right, *wrong], len(right))


def test_one_shot_then_decode_and_verify_over_every_boundary(case: Case, mode: PoolMode) -> None:
    """All boundary lengths in one ragged prefill batch, then batched steps with rollbacks."""
    serving = Serving(case.model, mode)
    requests = [serving.open(f"L{length}") for length in BOUNDARIES]
    serving.step(
        [_feed(case, one, length) for one, length in zip(requests, BOUNDARIES, strict=True)]
    )
    rng = random.Random(3)
    serving.step([_feed(case, one, 1) for one in requests])
    for _ in range(4):
        serving.step([_guess(case, one, rng.randrange(VERIFY_TOKENS), rng) for one in requests])
    assert max(error(one, case.logits) for one in requests) <= TOLERANCE
    serving.close(requests)


def test_chunk_sizes_side_by_side(case: Case, mode: PoolMode) -> None:
    """Chunks of 1, 3, 7, 64 and mixed sizes, each in one batch with all the others."""
    serving = Serving(case.model, mode)
    rng = random.Random(5)
    plans: dict[str, list[int]] = {
        **{f"chunk{n}": [n] * _STEPS for n in (1, 3, 7, 64)},
        "1_over_128": [120] + [1] * _STEPS,
        "1_over_256": [250] + [1] * _STEPS,
        "3_over_128": [101] + [3] * _STEPS,
        "7_over_256": [190] + [7] * _STEPS,
        "mixed": [rng.choice((1, 1, 1, 2, 5, 33, 130)) for _ in range(_STEPS)],
    }
    requests = {name: serving.open(name) for name in plans}
    for turn in range(_STEPS):
        steps = []
        for name, request in requests.items():
            count = min(plans[name][turn], LONGEST - request.length)
            if count:
                steps.append(_feed(case, request, count))
        serving.step(steps)
    assert requests["chunk1"].length == _STEPS
    assert requests["chunk64"].length == LONGEST
    for name, request in requests.items():
        assert error(request, case.logits) <= TOLERANCE, name
    serving.close(list(requests.values()))


def test_alone_equals_batched(case: Case, mode: PoolMode) -> None:
    serving = Serving(case.model, mode)
    alone = serving.open("alone")
    for count in (5, 123, 1, 1, 200, 1):
        serving.step([_feed(case, alone, count)])
    assert error(alone, case.logits) <= TOLERANCE
    serving.close([alone])


def test_small_pages(case: Case) -> None:
    """Pages that the window spans several of, with a chunk longer than any of them."""
    serving = Serving(
        case.model,
        PoolMode.PAGED,
        page_tokens=128 if case.model.target.config.hca_ratio == 128 else 16,
    )
    request = serving.open("small")
    for count in (3, 90, 1, 40, *([1] * 20)):
        serving.step([_feed(case, request, count)])
    assert error(request, case.logits) <= TOLERANCE
    serving.close([request])


@pytest.mark.parametrize("start_of", ["whole", "window"])
def test_nextn_in_chunks(case: Case, mode: PoolMode, start_of: str) -> None:
    """The draft over all rows, or over the last W only: the row that counts is the same."""
    length = 150
    serving = Serving(case.model, mode)
    request = serving.open("draft")
    with torch.no_grad():
        expected = case.oracle.nextn(
            case.streams[:length], torch.tensor(case.ids[1 : length + 1]), 0, None
        )
    first = 0 if start_of == "whole" else length - WINDOW
    request.tables.draft_valid_from = first
    rows = []
    for count in (7, 1, 100, 29, 13):
        at = request.length
        hidden = serving.step([_feed(case, request, count)])
        begin = max(at, first)
        if begin < request.length:
            next_ids = case.ids[begin + 1 : request.length + 1]
            rows.append(serving.draft_rows(request, begin, next_ids, hidden[begin - at :]))
    actual = torch.cat(rows)
    if start_of == "whole":
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=TOLERANCE)
    else:
        torch.testing.assert_close(actual[-1], expected[-1], rtol=1e-4, atol=TOLERANCE)
        assert (actual[0] - expected[first]).abs().max() > 1e-2  # that row lacked its window
    logits = case.oracle.nextn.logits(expected[-1:])
    assert (serving.draft.logits(actual[-1:]) - logits).abs().max() <= TOLERANCE
    serving.close([request])


def test_nextn_chain_and_verify(case: Case, mode: PoolMode) -> None:
    """Three chained drafts from the draft's own streams, then the true streams overwrite them."""
    length, steps = 133, VERIFY_TOKENS - 1
    serving = Serving(case.model, mode)
    request = serving.open("chain")
    hidden = serving.step([_feed(case, request, length)])
    mine = serving.draft_rows(request, 0, case.ids[1 : length + 1], hidden)
    for _ in range(2):
        n = request.length
        serving.memory.extend(request.tables, n + VERIFY_TOKENS)
        chained = _chain(case, serving, request, mine[-1:], steps)
        expected = _chain_oracle(case, n, steps)
        torch.testing.assert_close(chained, expected, rtol=1e-4, atol=TOLERANCE)
        # Verify a block of which two drafts are right; redo the draft's rows with true streams.
        hidden = serving.step([_guess(case, request, 2, random.Random(1))])
        mine = serving.draft_rows(request, n, case.ids[n + 1 : n + 4], hidden[:3])
    with torch.no_grad():
        ids = torch.tensor(case.ids[1 : request.length + 1])
        truth = case.oracle.nextn(case.streams[: request.length], ids, 0, None)
    torch.testing.assert_close(mine[-1], truth[-1], rtol=1e-4, atol=TOLERANCE)
    serving.close([request])


def _chain(case: Case, serving: Serving, request: Served, last: Tensor, steps: int) -> Tensor:
    """Draft streams at positions n .. n + steps - 1, each fed by the one before."""
    rows, n = [], request.length
    for step in range(steps):
        last = serving.draft_rows(request, n + step, [case.ids[n + step + 1]], last)
        rows.append(last)
    return torch.cat(rows)


def _chain_oracle(case: Case, n: int, steps: int) -> Tensor:
    """The same by recomputing the whole draft each time."""
    streams = case.streams[:n]
    with torch.no_grad():
        last = case.oracle.nextn(streams, torch.tensor(case.ids[1 : n + 1]), 0, None)[-1:]
        rows = []
        for step in range(1, steps + 1):
            streams = torch.cat((streams, last))
            ids = torch.tensor(case.ids[1 : n + step + 1])
            last = case.oracle.nextn(streams, ids, 0, None)[-1:]
            rows.append(last)
    return torch.cat(rows)


def test_draft_rows_that_never_arrived_are_masked(case: Case, mode: PoolMode) -> None:
    """With the draft window withheld, the draft sees its own new rows only: no stale or NaN row."""
    length, extra = 40, 5
    serving = Serving(case.model, mode)
    request = serving.open("withheld")
    serving.step([_feed(case, request, length)])
    request.tables.draft_valid_from = length
    rows = []
    for at in range(length, length + extra):
        hidden = serving.step([_feed(case, request, 1)])
        rows.append(serving.draft_rows(request, at, [case.ids[at + 1]], hidden))
    with torch.no_grad():
        ids = torch.tensor(case.ids[length + 1 : length + extra + 1])
        expected = case.oracle.nextn(case.streams[length : length + extra], ids, 0, None)
    assert (torch.cat(rows) - expected).abs().max() <= TOLERANCE
    serving.close([request])


def test_bfloat16_model_stays_close(case: Case, mode: PoolMode) -> None:
    """Reduced precision end to end: parameters that must stay float32 do, and nothing overflows."""
    model = load_deepseek_v4(case.oracle.folder, dtype=torch.bfloat16)
    serving = Serving(model, mode, kv_dtype="bfloat16")
    request = serving.open("half")
    serving.step([_feed(case, request, 100)])
    serving.step([_feed(case, request, 1)])
    actual = torch.cat(request.logits)
    assert actual.dtype == torch.float32
    agreement = (actual.argmax(-1) == case.logits[:101].argmax(-1)).float().mean().item()
    assert agreement > 0.8
    serving.close([request])


def test_bfloat16_rows_round_alike_in_every_schedule(case: Case, mode: PoolMode) -> None:
    """Rows of the chunk itself go through the pool's dtype too, so chunking doesn't change them."""
    serving = Serving(case.model, mode, kv_dtype="bfloat16")
    whole, pieces = serving.open("whole"), serving.open("pieces")
    serving.step([_feed(case, whole, 12)])
    for count in (5, 1, 6):
        serving.step([_feed(case, pieces, count)])
    difference = (torch.cat(whole.logits) - torch.cat(pieces.logits)).abs().mean()
    rounding = (torch.cat(whole.logits) - case.logits[:12]).abs().mean()
    assert difference < rounding / 20  # not 0: a value on the edge of two roundings may flip
    serving.close([whole, pieces])
