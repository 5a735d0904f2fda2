"""``sluice up`` as a person uses it: it serves, stops in order, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest

from sluice.cli.__main__ import main

pytestmark = [pytest.mark.e2e, pytest.mark.nixl, pytest.mark.slow]
_READY_S = 90.0


class Up:
    """A running ``sluice up`` with its output in files."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.out, self.err, self.logs = folder / "out", folder / "err", folder / "logs"
        command = [sys.executable, "-m", "sluice.cli", "up", "--port", "0"]
        command += ["--model", str(model), "--logs", str(self.logs)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(command, stdout=out, stderr=err)

    def children(self) -> dict[str, psutil.Process]:
        """By role."""
        found = psutil.Process(self.process.pid).children()
        return {child.cmdline()[-1].removeprefix("services."): child for child in found}

    def wait_ready(self) -> str:
        """The URL it prints."""
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline and self.process.poll() is None:
            if "Ctrl-C" in (text := self.out.read_text()):
                match = re.search(r"Sluice is up at (\S+)", text)
                assert match is not None
                return match.group(1)
            time.sleep(0.1)
        raise AssertionError(f"not ready: {self.out.read_text()}\n{self.err.read_text()}")

    def curl_body(self) -> dict[str, object]:
        """The body of the curl command it prints."""
        match = re.search(r"-d '(\{.*\})'", self.out.read_text())
        assert match is not None
        body: dict[str, object] = json.loads(match.group(1))
        return body


@contextmanager
def running(folder: Path, model: Path) -> Iterator[Up]:
    up = Up(folder, model)
    try:
        yield up
    finally:
        up.process.kill()
        up.process.wait()


def _gone(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=5)[1]


def test_it_serves_and_stops_in_order(tmp_path: Path, model_dir: Path) -> None:
    with running(tmp_path, model_dir) as up:
        url = up.wait_ready()
        children = up.children()
        assert sorted(children) == ["decode", "prefill", "router"]
        answer = httpx.post(f"{url}/v1/completions", json=up.curl_body(), trust_env=False)
        events = [line for line in answer.text.split("\n\n") if line]
        assert events[-1] == "data: [DONE]"
        assert json.loads(events[-2].removeprefix("data: "))["choices"][0]["finish_reason"]
        up.process.send_signal(signal.SIGINT)
        assert up.process.wait(timeout=30) == 0
        assert _gone(list(children.values()))
        stops = re.findall(r"(\w+): stopped", up.out.read_text())
        assert stops == ["router", "decode", "prefill"]
        assert "Traceback" not in up.err.read_text()


def test_pairs_are_proven_from_the_command_line(
    tmp_path: Path, model_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, model_dir) as up:
        url = up.wait_ready()
        assert main(["pair", "--router", url, "--complete", "--json"]) == 0
        pair, completion = json.loads(capsys.readouterr().out)
        prefill, decode = pair["what"].split(" -> ")
        assert "digests equal" in pair["detail"]
        assert completion["detail"].startswith("8 tokens")
        assert main(["pair", "--decode", decode, "--prefill", prefill]) == 0
        capsys.readouterr()
        up.children()["prefill"].kill()
        assert main(["pair", "--decode", decode, "--prefill", prefill, "--timeout-s", "5"]) == 1
        assert capsys.readouterr().out.startswith(f"FAIL {prefill} -> {decode}")
        assert up.process.wait(timeout=30) == 2
    assert main(["pair", "--router", url, "--complete"]) == 2  # nobody is there any more
    assert "no router answers" in capsys.readouterr().err


def test_a_child_that_dies_takes_the_rest_down_and_is_named(
    tmp_path: Path, model_dir: Path
) -> None:
    with running(tmp_path, model_dir) as up:
        up.wait_ready()
        children = up.children()
        children["decode"].kill()
        assert up.process.wait(timeout=30) == 2
        assert _gone(list(children.values()))
        assert "decode was ended by signal 9" in up.err.read_text()
        assert "listening" in up.err.read_text()  # the end of its log


def test_a_pod_that_cannot_start_shows_its_own_words(tmp_path: Path) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "made_up"}')
    with running(tmp_path, broken) as up:
        assert up.process.wait(timeout=60) == 2
        text = up.err.read_text()
        assert "exited with code 2" in text
        assert "ChildDied" in text
