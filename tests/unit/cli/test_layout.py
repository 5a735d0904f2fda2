"""``sluice layout``: files and running pods of either role, exit codes, JSON, and what people read."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc import aio

from sluice.cli.layout import add_parser
from sluice.layout.encoding import decode, encode
from sluice.layout.layout import Layout
from sluice.rpc.convert import layout_to_pb
from sluice.v1 import decode_pb2_grpc, layout_pb2, prefill_pb2_grpc
from tests.unit.layout.example_layouts import SMALL, Pod, layout_of, pair, with_component


def run(*words: str) -> int:
    parser = argparse.ArgumentParser(prog="sluice")
    add_parser(parser.add_subparsers(required=True))
    args = parser.parse_args(["layout", *words])
    return int(args.run(args))


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, str]:
    """Paths of saved layouts: a pair that agrees, and some that don't fit it."""
    prefill, decode_pod = pair()
    layouts = {
        "prefill": prefill,
        "decode": decode_pod,
        "unified": layout_of(SMALL, Pod(mode="unified")),
        "plain": layout_of(SMALL, Pod("prefill", steps=0)),
        "broken": with_component(decode_pod, "draft.swa", num_items=3),
    }
    for name, layout in layouts.items():
        (tmp_path / name).write_text(encode(layout))
    return {name: str(tmp_path / name) for name in layouts}


def test_show_prints_components_and_saves_what_it_read(
    saved: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "copy.json"
    assert run("show", saved["prefill"], "--tokens", "1000", "--save", str(copy)) == 0
    out = capsys.readouterr().out
    assert "target.c128_tail" in out
    assert "a prompt of 1000 tokens moves" in out
    assert decode(copy.read_text()) == pair()[0]


def test_show_as_json_is_a_file_that_can_be_read_again(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", saved["unified"], "--json") == 0
    assert decode(capsys.readouterr().out) == layout_of(SMALL, Pod(mode="unified"))


def test_diff_of_a_pair_that_fits(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", saved["prefill"], saved["decode"]) == 0
    assert capsys.readouterr().out.startswith("agreed: 9 components will be sent")


def test_diff_of_a_pair_that_does_not(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", saved["prefill"], saved["unified"]) == 1
    out = capsys.readouterr().out
    assert out.startswith("refused: 1 fatal difference (and 6 that follow)")
    assert "set SLUICE_DECODE_POOL_MODE=paged on the decode pod" in out


def test_diff_as_json(saved: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("diff", saved["prefill"], saved["unified"], "--json") == 1
    refused = json.loads(capsys.readouterr().out)
    assert not refused["agreed"]
    assert "geometry.pool_mode" in {m["path"] for m in refused["mismatches"]}
    assert run("diff", saved["prefill"], saved["decode"], "--json") == 0
    agreed = json.loads(capsys.readouterr().out)
    assert agreed["agreed"]
    assert len(agreed["digest"]) == 64
    assert agreed["components"][-1] == "draft.hidden"


def test_a_missing_draft_is_accepted_only_when_said(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("diff", saved["plain"], saved["decode"]) == 1
    assert run("check", saved["plain"], saved["decode"], "--allow-missing-draft") == 0
    assert "agreed " in capsys.readouterr().out


def test_check_says_it_in_one_line(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", saved["prefill"], saved["decode"]) == 0
    assert run("check", saved["prefill"], saved["unified"]) == 1
    assert run("check", saved["decode"]) == 0
    assert run("check", saved["broken"]) == 1
    agreed, refused, fine, broken = capsys.readouterr().out.splitlines()
    assert agreed.startswith("agreed ")
    assert "geometry.pool_mode: prefill paged, decode unified" in refused
    assert fine == "ok"
    assert "components[draft.swa].num_items" in broken


def test_check_of_one_pod_as_json(
    saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", saved["broken"], "--json") == 1
    verdict = json.loads(capsys.readouterr().out)
    assert not verdict["ok"]
    assert "target: WINDOW_PAGE" in verdict["broken"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere", "neither a file nor host:port"),
        ("127.0.0.1:1", "127.0.0.1:1"),
        (__file__, "not a readable layout file"),
        (sys.executable, "is not a layout file"),
    ],
)
def test_a_source_that_cannot_be_read_is_exit_code_2(
    source: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("show", source, "--timeout-s", "1") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err


@pytest.mark.parametrize("words", [("diff", "a"), ("show",), ("show", "a", "--tokens", "0"), ()])
def test_a_malformed_command_is_exit_code_2(
    words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        run(*words)
    assert caught.value.code == 2
    assert "usage: sluice layout" in capsys.readouterr().err


class PrefillPod(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    async def GetLayout(
        self, request: layout_pb2.GetLayoutRequest, context: object
    ) -> layout_pb2.GetLayoutResponse:
        return layout_pb2.GetLayoutResponse(layout=layout_to_pb(self.layout), epoch="e")


class DecodePod(decode_pb2_grpc.DecodeServicer):
    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    async def GetLayout(
        self, request: layout_pb2.GetLayoutRequest, context: object
    ) -> layout_pb2.GetLayoutResponse:
        return layout_pb2.GetLayoutResponse(layout=layout_to_pb(self.layout), epoch="e")


@pytest.fixture
def running() -> Iterator[tuple[str, str]]:
    """Addresses of a prefill and a decode pod that answer ``GetLayout`` and nothing else."""
    prefill, decode_pod = pair(mode="unified")
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    servers: list[aio.Server] = []

    async def start() -> tuple[str, str]:
        servers.extend((aio.server(), aio.server()))
        prefill_pb2_grpc.add_PrefillServicer_to_server(PrefillPod(prefill), servers[0])  # type: ignore[abstract]
        decode_pb2_grpc.add_DecodeServicer_to_server(DecodePod(decode_pod), servers[1])  # type: ignore[abstract]
        ports = [server.add_insecure_port("127.0.0.1:0") for server in servers]
        for server in servers:
            await server.start()
        return f"127.0.0.1:{ports[0]}", f"127.0.0.1:{ports[1]}"

    async def stop() -> None:
        for server in servers:
            await server.stop(None)

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(10)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


def test_running_pods_of_both_roles_are_asked(
    running: tuple[str, str], saved: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("check", *running) == 0
    assert run("show", running[1]) == 0
    assert "target.swa_ring" in capsys.readouterr().out
    assert run("diff", saved["prefill"], running[1]) == 1
