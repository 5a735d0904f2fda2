"""What is kept while an answer is written: only state of accepted tokens, at depths of the grid."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest

from sluice.config import EngineConfig, PoolMode
from sluice.engine.core import EngineCore
from sluice.engine.radix import Node
from sluice.errors import PoolError
from sluice.layout.component import Coverage
from sluice.models.base import DraftModel
from sluice.models.snapshots import Crossing, SnapshotGrid
from sluice.types import Request, RequestId
from tests.unit.engine.driving import Story, run_all
from tests.unit.engine.toy_history import HistoryToy, history_core
from tests.unit.engine.toy_model import OracleDraft, ToyTarget, prompt_of, request, toy_core
from tests.unit.engine.toy_recurrent import (
    COLUMNS,
    RecurrentToy,
    State,
    ToyPending,
    fold,
    recurrent_core,
)

MODES = list(PoolMode)
STEP = 16  # of the grid
FAMILIES: dict[str, tuple[Callable[..., EngineCore], type[ToyTarget]]] = {
    "windows": (toy_core, ToyTarget),
    "recurrent": (recurrent_core, RecurrentToy),
    "history": (history_core, HistoryToy),
}
FIRST = request("first", prompt_of(13), max_tokens=60)
Right = Callable[[int], bool]


def _always(_: int) -> bool:
    return True


def _never(_: int) -> bool:
    return False


def _half(position: int) -> bool:
    return position % 2 == 0


RIGHT = [_always, _never, _half]


@functools.cache
def _truth(family: str) -> tuple[int, ...]:
    """The first request's prompt and answer."""
    core = FAMILIES[family][0](steps=0)
    return (*FIRST.prompt, *run_all(core, [FIRST])[FIRST.request_id].tokens)


def _core(
    family: str, right: Right | None, mode: PoolMode = PoolMode.PAGED, max_bytes: int = 1 << 20
) -> EngineCore:
    make, target = FAMILIES[family]
    draft: DraftModel | None = None
    if right is not None:
        needs = [spec for spec in make().memory._needs if spec.name.startswith("draft.")]
        ids = {FIRST.request_id: _truth(family), RequestId("next"): _truth(family)}
        draft = OracleDraft(ids, right, needs=needs)
    config = EngineConfig(prefix_bytes=max_bytes, prefix_interval_tokens=STEP)
    return make(mode=mode, draft=draft, target=target(), config=config)


def _nodes(core: EngineCore) -> list[Node]:
    prefixes = core._scheduler._prefixes
    assert prefixes is not None
    return list(prefixes._tree._order)


def _known(core: EngineCore, tokens: tuple[int, ...]) -> int:
    prefixes = core._scheduler._prefixes
    assert prefixes is not None
    return prefixes.match(tokens, len(tokens)).depth


def _tokens_of(node: Node) -> tuple[int, ...]:
    before = () if node.parent is None else _tokens_of(node.parent)
    return (*before, *node.key)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("right", RIGHT)
def test_the_next_turn_starts_behind_the_answer_and_says_what_it_would_have_said(
    mode: PoolMode, family: str, right: Right
) -> None:
    core = _core(family, right, mode)
    run_all(core, [FIRST])
    truth = _truth(family)
    # The newest token has no state; the last depth below it was kept whatever was accepted when.
    assert _known(core, truth) == (len(truth) - 1) // STEP * STEP
    turn = request("next", (*truth, *prompt_of(9)), temperature=0.9, top_p=0.95, seed=3)
    cold = _core(family, right, mode, max_bytes=0)
    rows = _count_rows(core, turn)
    assert run_all(core, [turn]) == run_all(cold, [turn])
    assert 0 < rows() <= STEP + 9 + 8


def _count_rows(core: EngineCore, turn: Request) -> Callable[[], int]:
    """Prompt rows that the target runs from here on."""
    counted = [0]

    def count(batch) -> None:  # type: ignore[no-untyped-def]
        for segment in batch.segments:
            counted[0] += max(0, min(segment.stop, len(turn.prompt)) - segment.start)

    core._target.before_forward = count  # type: ignore[attr-defined]
    return lambda: counted[0]


@pytest.mark.parametrize("right", RIGHT)
def test_kept_recurrent_state_is_that_of_a_fresh_run_over_the_kept_tokens(right: Right) -> None:
    core = _core("recurrent", right)
    run_all(core, [FIRST])
    depths = []
    for node in _nodes(core):
        if node.state is None:
            continue
        tokens = _tokens_of(node)
        depths.append(len(tokens))
        rows = {one.name: one.rows[0] for one in node.state.components}
        conv = rows["kda.conv"].view(-1).numpy().view("float32")
        folded = rows["kda.recurrent"].view(-1).numpy().view("float32")
        state = State(tuple(int(value) for value in conv), int(folded[0]))
        assert len(state.conv) == COLUMNS
        assert state == fold(tokens)
        assert int(rows["kda.length"].view(-1).numpy().view("int64")[0]) == len(tokens)
    assert sorted(depths) == [16, 32, 48, 64]


def _steps(core: EngineCore, one: Request) -> Iterator[int]:
    """Committed tokens after each step."""
    core.submit(one)
    while core.step():
        core.drain()
        for active in core._scheduler._running:
            yield active.held_tables.kv_len


@pytest.mark.parametrize("family", ["windows", "recurrent"])
@pytest.mark.parametrize("right", RIGHT)
def test_a_rejected_draft_that_crosses_a_depth_leaves_no_snapshot(
    family: str, right: Right
) -> None:
    core = _core(family, right)
    crossed = 0
    for committed in _steps(core, FIRST):
        kept = [node.state.length for node in _nodes(core) if node.state is not None]
        assert sorted(kept) == list(range(STEP, committed + 1, STEP))
        # The next step verifies across a depth, and where drafts are wrong doesn't reach it.
        crossed += committed // STEP < (committed + 4) // STEP
    assert crossed >= (3 if right is not _always else 1)
    assert core.memory.at_baseline()


def test_tokens_behind_a_stop_token_are_not_kept() -> None:
    truth = _truth("recurrent")
    # The step from 13 + 1 verifies 14..17, all right; the answer ends at the token at 14 or 15.
    stop = truth[15]
    assert stop not in truth[13:15]
    one = request("first", FIRST.prompt, max_tokens=60, stop_token_ids=(stop,))
    core = _core("recurrent", _always)
    assert run_all(core, [one])[one.request_id].tokens == list(truth[13:16])
    assert _known(core, truth) == STEP
    stop = truth[14]
    one = request("first", FIRST.prompt, max_tokens=60, stop_token_ids=(stop,))
    core = _core("recurrent", _always)
    assert run_all(core, [one])[one.request_id].tokens == list(truth[13:15])
    assert _nodes(core) == [], "15 tokens are the answer's, whatever was verified behind them"


@pytest.mark.parametrize("status", ["queued", "prefilling", "running"])
def test_an_abort_at_any_time_leaves_the_kept_beginning_whole(status: str) -> None:
    """Copying a hit is part of admission, so an abort comes before it or after it."""
    core = _core("windows", None)
    run_all(core, [FIRST])
    truth = _truth("windows")
    turn = request("next", (*truth, *prompt_of(40)), max_tokens=8)
    expected = run_all(_core("windows", None, max_bytes=0), [turn])
    before = _known(core, turn.prompt)
    core.submit(turn)
    if status != "queued":
        core._scheduler.admit()
    active = core._requests[turn.request_id]
    while status == "running" and active.status.value != status:
        core.step()
    assert active.status.value == status
    core.abort(turn.request_id)
    core.drain()
    assert core.memory.at_baseline()
    core.memory.check()
    assert _known(core, turn.prompt) >= before
    assert run_all(core, [turn]) == expected


# ---- mutations


def test_forgetting_the_snapshot_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """State at a depth that the verify reached, whatever of it was accepted."""
    crossing = SnapshotGrid.crossing

    def forgetful(self: SnapshotGrid, length: int, commit_len: int) -> Crossing | None:
        return crossing(self, length, max(commit_len, self.verify_tokens))

    monkeypatch.setattr(SnapshotGrid, "crossing", forgetful)
    core = _core("recurrent", _never)
    with pytest.raises(PoolError, match="backup at 16 tokens, 15 are committed"):
        list(_steps(core, FIRST))


@pytest.mark.parametrize("shift", [1, -1])
def test_a_snapshot_of_another_token_of_the_verify_is_caught_by_its_length(
    monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    right = ToyPending.state_after
    monkeypatch.setattr(
        ToyPending,
        "state_after",
        lambda self, row, tokens: right(self, row, min(max(1, tokens + shift), 4)),
    )
    core = _core("recurrent", _always)
    run_all(core, [FIRST])
    turn = request("next", (*_truth("recurrent"), *prompt_of(9)))
    story: Story = run_all(core, [turn])[turn.request_id]
    assert "its recurrent state has taken in" in str(story.error)


def test_a_snapshot_that_lacks_recurrent_state_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine that copies the slot after the step, where the state has moved on."""
    monkeypatch.setattr(ToyPending, "state_after", lambda self, row, tokens: ())
    core = _core("recurrent", _always)
    names = [c.name for c in core.memory.components() if c.coverage is Coverage.LAST]
    assert "kda.conv" in names
    with pytest.raises(PoolError, match=r"kda\.conv of an earlier token is gone"):
        list(_steps(core, FIRST))
