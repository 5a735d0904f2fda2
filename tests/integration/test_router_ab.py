"""``sluice ab`` against a router whose pods give the wrong tokens: it must say so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from sluice.cli.__main__ import main
from sluice.rpc.messages import Finished, GenerateCall, Tokens
from sluice.text.tokenizer import ModelTokenizer
from sluice.types import FinishReason
from tests.integration.router_harness import USAGE, Event, ScriptedDecode, fails, router_over

_MODEL = Path(__file__).parents[2] / "models" / "tiny-dsv4"


async def _wrong(call: GenerateCall) -> AsyncIterator[Event]:
    """Two tokens that no model would say after each other for every prompt."""
    yield Tokens((511,))
    yield Tokens((510, 509, 508), 2)
    yield Finished(FinishReason.LENGTH, USAGE)


def _arguments(url: str, prompts: Path) -> list[str]:
    prompts.write_text("Once upon\n")
    arguments = ["ab", "--url", url, "--model", str(_MODEL), "--prompts", str(prompts)]
    return [*arguments, "--max-tokens", "4", "--spec-steps", "3"]


@pytest.mark.asyncio
async def test_divergence_is_exit_code_1_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = ModelTokenizer.load(_MODEL)
    async with router_over(ScriptedDecode([_wrong]), tokenizer=tokenizer) as stack:
        arguments = _arguments(stack.url, tmp_path / "prompts.txt")
        assert await asyncio.to_thread(main, arguments) == 1
    out = capsys.readouterr().out
    assert "#0: " in out
    assert "/ 511" in out
    assert "1 differ" in out


@pytest.mark.asyncio
async def test_a_failing_router_is_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decode = ScriptedDecode([fails(KeyError("broken"))])
    async with router_over(decode, tokenizer=ModelTokenizer.load(_MODEL)) as stack:
        arguments = _arguments(stack.url, tmp_path / "prompts.txt")
        assert await asyncio.to_thread(main, arguments) == 2
    assert "answered 500" in capsys.readouterr().err
