"""``sluice chat``, ``bench`` and ``status`` as processes against a real stack on the shipped model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY_DSV4
from tests.e2e.test_up import running

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.slow]
_WAIT_S = 60.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running(tmp_path_factory.mktemp("up"), TINY_DSV4) as up:
        yield up.wait_ready()
        up.process.send_signal(signal.SIGINT)
        up.process.wait(timeout=30)


def _command(*words: str) -> list[str]:
    return [sys.executable, "-m", "sluice.cli", *words]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_command(*words), capture_output=True, text=True, timeout=_WAIT_S)


def test_bench_of_both_loops_and_a_trace(url: str, tmp_path: Path) -> None:
    """All tokens that were asked for arrive, shared blocks and all, and the report is written."""
    load = ("--prompt-tokens", "20-60", "--output-tokens", "8", "--requests", "12", "--warmup", "2")
    for loop in (("--rate", "20"), ("--concurrency", "3")):
        out = _run("bench", "--url", url, *loop, *load, "--slo", "e2e=60000", "--json")
        assert out.returncode == 0, out.stderr
        summary = json.loads(out.stdout)["summary"]
        assert (summary["ok"], summary["good"], summary["errors"]) == (12, 12, [])
        assert summary["output_tokens"] == 12 * 8
        assert summary["acceptance"] > 1.0
        assert summary["ttft"]["p99"] >= summary["ttft"]["p50"] > 0
    trace = tmp_path / "trace.jsonl"
    rows = [(0, 1100, 160, [0, 1, 2]), (300, 1100, 80, [0, 1, 3]), (300, 900, 320, [4, 5])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    report = tmp_path / "report"
    words = ("--trace", str(trace), "--scale", "0.1", "--speed", "3", "--out", str(report))
    out = _run("bench", "--url", url, *words)
    assert out.returncode == 0, out.stdout + out.stderr
    samples = json.loads((report / "report.json").read_text())["samples"]
    assert [s["prompt_tokens"] for s in samples] == [110, 110, 90]
    assert sorted(s["output_tokens"] for s in samples) == [8, 16, 32]
    assert [s["due_s"] for s in samples] == pytest.approx([0.0, 0.1, 0.1])
    assert (report / "report.html").stat().st_size > 5000
    assert (report / "report.png").stat().st_size > 5000


def test_bench_says_what_failed(url: str) -> None:
    out = _run(
        "bench", "--url", url, "--requests", "2", "--warmup", "0", "--prompt-tokens", "99999"
    )
    assert out.returncode == 1
    assert "0 of 2 whole" in out.stdout
    assert "400 context_length_exceeded" in out.stdout


def test_status(url: str) -> None:
    out = _run("status", "--url", url, "--json")
    assert out.returncode == 0, out.stderr
    status = json.loads(out.stdout)
    assert status["ready"]
    assert len(status["pairs"]) == 1
    assert "ready" in _run("status", "--url", url).stdout
    nobody = _run("status", "--url", "http://127.0.0.1:1")
    assert nobody.returncode == 2
    assert "PeerLost" in nobody.stderr


def test_ctrl_c_stops_an_answer_and_not_the_chat(url: str) -> None:
    words = ("--raw", "--max-tokens", "3000", "--temperature", "0.7", "--seed", "5")
    process = subprocess.Popen(
        _command("chat", "--url", url, *words),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "500"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    said = b""

    def read_until(*parts: bytes) -> None:
        nonlocal said
        deadline = time.monotonic() + _WAIT_S
        while not all(part in said for part in parts):
            assert time.monotonic() < deadline, said
            data = os.read(process.stdout.fileno(), 4096)  # type: ignore[union-attr]
            assert data, said
            said += data

    def say(line: bytes) -> None:
        nonlocal said
        said = b""
        process.stdin.write(line + b"\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]

    try:
        read_until(b"> ")
        say(b"And it came to pass")
        read_until(b" the ")
        process.send_signal(signal.SIGINT)
        read_until(b"tokens", b", stopped", b"> ")
        say(b"/reset")
        read_until(b"forgotten", b"> ")
        process.send_signal(signal.SIGINT)
        read_until(b"Ctrl-D leaves", b"> ")
        say(b"/nonsense")
        read_until(b"/system TEXT")
        process.stdin.close()
        assert process.wait(timeout=_WAIT_S) == 0
    finally:
        process.kill()
        with process:  # closes its pipes
            pass
