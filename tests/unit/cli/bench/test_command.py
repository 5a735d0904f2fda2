"""``sluice bench`` as a command: what it plans to send, and wishes it refuses."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import httpx
import pytest

from sluice.cli.__main__ import build_parser, main
from sluice.cli.bench.command import _load, _plan, _slo
from sluice.cli.bench.drive import Watch
from sluice.cli.bench.summary import Slo
from sluice.cli.bench.workload import Item
from sluice.errors import ConfigError


def _args(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *words])


def _client(status: int = 200) -> httpx.AsyncClient:
    def answer(_: httpx.Request) -> httpx.Response:
        return httpx.Response(status, json={"tokens": list(range(5, 95))})

    return httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://r")


async def _planned(*words: str) -> tuple[list[Item], list[Item], int, str]:
    """(warm-up, first 200 of the load, its count, what it is called)."""
    args = _args(*words)
    async with _client() as client:
        plan = await _plan(args, client, "m")
    load, name = _load(args, plan, None, Watch(plan.count))
    load.close()
    items = [item for item, _ in zip(plan.items, range(200), strict=False)]
    return list(plan.warm), items, plan.count, name


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("words", "sent", "count", "name"),
    [
        ((), 100, 100, "closed loop: 100 requests, 8 at once"),
        (("--requests", "7"), 7, 7, "closed loop: 7 requests, 8 at once"),
        (("--concurrency", "2", "--duration", "3"), 200, 0, "closed loop: for 3 s, 2 at once"),
        (("--rate", "10", "--duration", "3"), 30, 30, "open loop: 30 requests at 10/s, poisson"),
        (
            ("--rate", "10", "--requests", "9", "--duration", "3", "--arrivals", "constant"),
            9,
            9,
            "open loop: 9 requests at 10/s, constant",
        ),
    ],
)
async def test_how_much_is_sent(words: tuple[str, ...], sent: int, count: int, name: str) -> None:
    _, items, planned, said = await _planned(*words)
    assert (len(items), planned, said) == (sent, count, name)


@pytest.mark.asyncio
@pytest.mark.parametrize("trace", [False, True])
async def test_no_prompt_of_the_warm_up_is_sent_again(tmp_path: Path, trace: bool) -> None:
    """It would find itself in the prefix cache, and the load would look better than it is."""
    words = ["--warmup", "5", "--prompt-tokens", "40"]
    if trace:
        rows = [
            {"timestamp": i, "input_length": 40, "output_length": 2, "hash_ids": [i]}
            for i in range(20)
        ]
        (tmp_path / "t").write_text("\n".join(json.dumps(row) for row in rows))
        words += ["--trace", str(tmp_path / "t")]
    warm, items, _, _ = await _planned(*words)
    assert len(warm) == 5
    assert len(items) == (20 if trace else 100)
    assert not {item.prompt[:8] for item in warm} & {item.prompt[:8] for item in items}


@pytest.mark.asyncio
async def test_a_server_that_cannot_tokenize_wants_a_folder() -> None:
    async with _client(404) as client:
        with pytest.raises(ConfigError, match="404") as caught:
            await _plan(_args(), client, "m")
    assert "--tokenizer" in caught.value.remedy


def test_limits_of_an_slo() -> None:
    assert _slo(["ttft=500", "tpot=12.5"]) == Slo(0.5, 0.0125, None)
    for wish in ("ttft", "ttft=x", "p99=5", "=5"):
        with pytest.raises(ConfigError, match="not understood"):
            _slo([wish])


@pytest.mark.parametrize(
    "words", [("--trace", "t", "--rate", "3"), ("--slo", "x=1"), ("--url", "nowhere")]
)
def test_wishes_that_are_refused(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert "ConfigError" in capsys.readouterr().err
