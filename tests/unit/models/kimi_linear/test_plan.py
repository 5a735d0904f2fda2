"""Which rows the layers read and write, on small batches worked out by hand."""

from __future__ import annotations

import torch

from sluice.models.kimi_linear.plan import KEY_BLOCK, groups_of, latent_plan, state_plan
from tests.unit.models.kimi_linear.tiny import Driver, prompt, tiny_target

TARGET = tiny_target()


def test_groups_put_verified_rows_first_and_chunks_alone() -> None:
    driver = Driver(TARGET)
    requests = [driver.open(prompt(3)) for _ in range(2)] + [driver.open() for _ in range(3)]
    ids = [(1, 2, 3), (4,), (5, 6), (7,), (8, 9, 10)]
    batch = driver.batch(list(zip(requests, ids, strict=True)))
    step, *chunks = groups_of(batch, 2)
    assert step.stepwise
    assert step.segment_R.tolist() == [0, 1, 3]  # two verified rows, then the prompt of one token
    assert step.token_RN.tolist() == [[0, 1, 2], [3, 3, 3], [6, 6, 6]]
    assert step.real_RN.tolist() == [[True] * 3, [True, False, False], [True, False, False]]
    assert step.token_U.tolist() == [0, 1, 2, 3, 6]
    assert step.place_U.tolist() == [0, 1, 2, 3, 6]
    assert (step.stop, [c.stop for c in chunks]) == (6, [2, 3])
    assert [c.segment_R.tolist() for c in chunks] == [[2], [4]]
    assert [c.token_U.tolist() for c in chunks] == [[4, 5], [7, 8, 9]]
    assert not any(c.stepwise for c in chunks)


def test_taps_reach_back_through_the_stored_columns() -> None:
    driver = Driver(TARGET)
    requests = [driver.open(prompt(5)), driver.open()]
    batch = driver.batch([(requests[0], (1,)), (requests[1], (2, 3, 4, 5))])
    plan = state_plan(batch, groups_of(batch, 0), 0, conv_width=4)
    # Rows 0..2 and 3..5 are the two segments' columns; 6 and 7..10 their tokens.
    assert plan.source_TW.tolist() == [
        [0, 1, 2, 6],
        [3, 4, 5, 7],
        [4, 5, 7, 8],
        [5, 7, 8, 9],
        [7, 8, 9, 10],
    ]
    assert plan.window_SW.tolist() == [[1, 2, 6], [8, 9, 10]]
    assert plan.fresh_S.tolist() == [False, True]
    assert plan.stop_S.tolist() == [6, 4]


def test_queries_see_what_came_before_in_whole_blocks_of_keys() -> None:
    driver = Driver(TARGET)
    requests = [driver.open(prompt(KEY_BLOCK - 1)), driver.open(prompt(4))]
    batch = driver.batch([(requests[0], (1, 2)), (requests[1], (3,))])
    component = driver.memory.component("target.mla")
    plan = latent_plan(batch, groups_of(batch, 2), component)
    (keys,) = plan.keys
    assert keys.row_RE.shape == (2, 2 * KEY_BLOCK)
    assert keys.visible_RNE.sum(-1).tolist() == [[KEY_BLOCK, KEY_BLOCK + 1], [5, 5]]
    pages = batch.tables.pages_SP
    assert plan.written_row_T.tolist() == [
        int(pages[0, 7]) * 16 + 15,
        int(pages[0, 8]) * 16,
        int(pages[1, 0]) * 16 + 4,
    ]
    # Surplus keys repeat a mapped row: nobody reads what an unmapped page holds.
    first = int(pages[1, 0]) * 16
    assert torch.equal(keys.row_RE[1, 5:], torch.full((2 * KEY_BLOCK - 5,), first))
    assert keys.row_RE[1, :5].tolist() == [first + i for i in range(5)]
