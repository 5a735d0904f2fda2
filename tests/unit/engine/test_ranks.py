"""Ranks that are told the same commands stay equal: tokens, page numbers, books; and end when one is lost."""

from __future__ import annotations

import inspect
import multiprocessing
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from sluice.config import EngineConfig, PoolConfig, SpecConfig
from sluice.engine.build import build_engine
from sluice.engine.core import EngineCore
from sluice.engine.ranks import LeadingCore, Turn, follow
from sluice.errors import BadRequest, InternalError, Overloaded, RankLost
from sluice.grammar.matcher import GrammarMatcher
from sluice.parallel.torch_group import TorchGroup
from sluice.types import Grammar, GrammarKind, Request, RequestId, Role, Sampling
from tests.unit.engine.driving import Story, run_all, run_until_idle, tell

MODEL = Path(__file__).parents[3] / "models" / "tiny-kimi"
POOL = PoolConfig(page_tokens=16, num_pages=14, num_slots=4, fill="nan")
CONFIG = EngineConfig(max_batch_tokens=48, max_queue=5, promised_output=0.1)


def _request(number: int, length: int = 20, **sampling: object) -> Request:
    chosen = Sampling(**{"max_tokens": 24, "ignore_eos": True, "seed": number, **sampling})  # type: ignore[arg-type]
    prompt = tuple(3 + (number * 31 + i * 7) % 400 for i in range(length))
    return Request(RequestId(f"r{number}"), prompt, chosen)


def _build(role: Role, group: TorchGroup) -> EngineCore:
    return build_engine(MODEL, role, POOL, SpecConfig(5), CONFIG, parallel=group)


@dataclass
class Ranks:
    """Rank 0 in this thread, the others in threads of their own."""

    cores: dict[int, EngineCore] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)

    def run(self, size: int, work: Callable[[LeadingCore], None]) -> None:
        pipes = [multiprocessing.Pipe(duplex=False) for _ in range(size - 1)]
        with TemporaryDirectory() as folder:
            meeting = Path(folder) / "ranks"
            threads = [
                threading.Thread(
                    target=self._follow, args=(meeting, rank, size, pipes[rank - 1][0])
                )
                for rank in range(1, size)
            ]
            for thread in threads:
                thread.start()
            group = TorchGroup(meeting, 0, size, timeout_s=20)
            core = _build(Role.AGGREGATED, group)
            assert isinstance(core, LeadingCore)
            core.lead(lambda turn: [pipe[1].send_bytes(turn) for pipe in pipes] and None)
            self.cores[0] = core
            try:
                work(core)
            finally:
                for pipe in pipes:
                    with suppress(OSError):
                        pipe[1].send_bytes(Turn((), stop=True).pack())
                    pipe[1].close()
                for thread in threads:
                    thread.join(20)

    def _follow(self, meeting: Path, rank: int, size: int, turns: Connection) -> None:
        core = _build(Role.AGGREGATED, TorchGroup(meeting, rank, size, timeout_s=20))
        self.cores[rank] = core
        try:
            follow(core, turns.recv_bytes, lambda _: None)
        except Exception as error:
            self.errors[rank] = error


def test_ranks_stay_equal_through_aborts_refusals_and_retractions() -> None:
    stories: dict[RequestId, Story] = {}
    tables: dict[int, list[list[int]]] = {}
    ranks = Ranks()

    def work(core: LeadingCore) -> None:
        for number in range(5):
            core.submit(_request(number, temperature=0.7 * (number % 2)))
        with pytest.raises(Overloaded):
            core.submit(_request(9))
        for _ in range(4):
            core.step()
        tell(stories, core.drain())
        running = next(r for r in core._requests.values() if r.status.value == "running")
        core.abort(RequestId("r1"))
        core.retract(running.request_id)
        for _ in range(3):
            core.step()
        tell(stories, core.drain())
        core.step()
        tell(stories, core.drain())
        tell(stories, run_until_idle(core))
        assert core.stats().retractions > 0
        tables[0] = [[core.stats().steps, core.stats().retractions]]

    ranks.run(2, work)
    assert not ranks.errors
    for core in ranks.cores.values():
        assert core.memory.at_baseline()
        assert [[core.stats().steps, core.stats().retractions]] == tables[0]
    assert stories[RequestId("r1")].error is not None
    others = {name: story.tokens for name, story in stories.items() if name != "r1"}
    assert others == _alone([0, 2, 3, 4])


def _alone(numbers: list[int]) -> dict[RequestId, list[int]]:
    """The same requests on one rank, with room for all."""
    told: dict[RequestId, Story] = {}
    pool = PoolConfig(page_tokens=16, num_pages=40, num_slots=6, fill="nan")
    core = build_engine(MODEL, Role.AGGREGATED, pool, SpecConfig(5), EngineConfig())
    for number in numbers:
        core.submit(_request(number, temperature=0.7 * (number % 2)))
    tell(told, run_until_idle(core))
    return {name: story.tokens for name, story in told.items()}


def test_every_command_is_said_to_the_other_ranks() -> None:
    """A command that is added to the engine and not here would part the ranks without a word."""
    public = {
        name
        for name, member in vars(EngineCore).items()
        if inspect.isfunction(member) and not name.startswith("_")
    }
    told_as_turns = {"step", "shutdown"}
    assert public - {"layout", "drain", "stats"} - told_as_turns == {
        name for name in public - told_as_turns if name in vars(LeadingCore)
    }


def test_grammars_are_the_leaders_affair() -> None:
    """Others compile none, and still end with the leader those that are refused or get stuck."""
    stories: dict[RequestId, Story] = {}
    list_of_words = Grammar(GrammarKind.REGEX, r"\[(\"[a-z]+\"(, )?){1,3}\]")
    wanted = _request(0, grammar=list_of_words)
    ranks = Ranks()

    def work(core: LeadingCore) -> None:
        with pytest.raises(BadRequest):
            core.submit(_request(7, grammar=Grammar(GrammarKind.REGEX, "(")))
        core.submit(wanted)
        core.submit(_request(1, grammar=Grammar(GrammarKind.REGEX, "\U0010fffd+"), max_tokens=3))
        core.submit(_request(2))
        core.step()
        stuck = core._requests[RequestId("r1")].steering
        assert stuck is not None
        assert isinstance(stuck._matcher, GrammarMatcher)
        stuck._matcher.failure = BadRequest("stuck", field="grammar")
        tell(stories, run_until_idle(core))

    ranks.run(2, work)
    assert not ranks.errors
    for core in ranks.cores.values():
        assert core.memory.at_baseline()
        assert not core._requests
    assert ranks.cores[1].grammars.matcher(list_of_words) is None
    assert str(stories[RequestId("r1")].error) == "[validate] stuck"
    assert stories[RequestId("r2")].tokens == _alone([2])[RequestId("r2")]
    alone = build_engine(MODEL, Role.AGGREGATED, POOL, SpecConfig(5), EngineConfig())
    assert stories[RequestId("r0")] == run_all(alone, [wanted])[RequestId("r0")]


def test_a_choice_that_fails_fails_the_step_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    stories: dict[RequestId, Story] = {}
    ranks = Ranks()

    def work(core: LeadingCore) -> None:
        core.submit(_request(0))
        with monkeypatch.context() as broken:
            broken.setattr(core._runner, "_verdicts", lambda *_: 1 // 0)
            tell(stories, run_until_idle(core))
        core.submit(_request(2))
        tell(stories, run_until_idle(core))

    ranks.run(2, work)
    assert not ranks.errors
    assert all(core.memory.at_baseline() and not core._requests for core in ranks.cores.values())
    assert isinstance(stories[RequestId("r0")].error, InternalError)
    assert stories[RequestId("r2")].tokens == _alone([2])[RequestId("r2")]


def test_a_follower_that_loses_its_leader_ends() -> None:
    def gone() -> bytes:
        raise EOFError

    core = build_engine(MODEL, Role.AGGREGATED, POOL, SpecConfig(0), CONFIG)
    with pytest.raises(RankLost, match="rank 0 is gone"):
        follow(core, gone, lambda _: None)
