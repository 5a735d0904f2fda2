"""A grammar's compilation holds up its own request only, and a bad one reserves nothing."""

from __future__ import annotations

import asyncio
import threading

import pytest

from sluice.errors import BadRequest, DeadlineExceeded
from sluice.grammar.matcher import Matcher
from sluice.types import Grammar, GrammarKind, RequestId, Role
from tests.unit.engine.facade_harness import SOON_S, read, running, settled
from tests.unit.engine.toy_model import prompt_of, request, toy_core
from tests.unit.grammar.letters import letters

pytestmark = pytest.mark.asyncio
FINE, BAD = Grammar(GrammarKind.REGEX, "(a|b)*"), Grammar(GrammarKind.REGEX, "(")


class _Slow:
    """Compiles once the test lets it."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self.thread = ""

    def matcher(self, grammar: Grammar) -> Matcher:
        self.thread = threading.current_thread().name
        self.entered.set()
        assert self.open.wait(SOON_S)
        return letters().matcher(grammar)


@pytest.mark.parametrize("role", [Role.DECODE, Role.PREFILL])
async def test_a_bad_grammar_is_refused_with_nothing_reserved(role: Role) -> None:
    core = toy_core(role, grammars=letters())
    async with running(core) as facade:
        one = request("r", prompt_of(5), grammar=BAD)
        decodes = role is Role.DECODE
        asked = facade.reserve(one, SOON_S) if decodes else facade.prefill(one, lambda chunk: None)
        with pytest.raises(BadRequest, match="unclosed group") as refused:
            await asked
        assert refused.value.field == "grammar"
        stats = await facade.stats()
        assert stats.baseline
        assert (stats.queued, stats.waiting) == (0, 0)


async def test_a_bad_grammar_comes_out_of_the_stream() -> None:
    async with running(toy_core(grammars=letters())) as facade:
        with pytest.raises(BadRequest, match="unclosed group"):
            await read(facade.generate(request("r", prompt_of(5), grammar=BAD)))
        assert (await facade.stats()).baseline


async def test_others_are_served_while_a_grammar_compiles() -> None:
    slow = _Slow()
    async with running(toy_core(Role.DECODE, grammars=slow)) as facade:
        held_up = asyncio.create_task(facade.reserve(request("a", prompt_of(5), grammar=FINE), 60))
        assert await asyncio.to_thread(slow.entered.wait, SOON_S)
        await facade.reserve(request("b", prompt_of(5)), SOON_S)
        assert not held_up.done()
        assert slow.thread != "engine-step"
        slow.open.set()
        await held_up
        for name in ("a", "b"):
            await facade.release(RequestId(name))
        assert (await facade.stats()).baseline


@pytest.mark.parametrize("gives_up", ["cancelled", "late"])
async def test_giving_up_while_a_grammar_compiles_leaves_nothing(gives_up: str) -> None:
    slow = _Slow()
    async with running(toy_core(Role.DECODE, grammars=slow)) as facade:
        timeout_s = 0.05 if gives_up == "late" else SOON_S
        one = request("a", prompt_of(5), grammar=FINE)
        task = asyncio.create_task(facade.reserve(one, timeout_s))
        assert await asyncio.to_thread(slow.entered.wait, SOON_S)
        if gives_up == "cancelled":
            task.cancel()
        with pytest.raises((asyncio.CancelledError, DeadlineExceeded)):
            await task
        slow.open.set()
        await settled(facade)
        assert (await facade.stats()).queued == 0
