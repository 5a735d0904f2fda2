"""A router over two pairs of two layout classes, found through a watched file; real processes, steered by tests."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.e2e.pods import Pair, Pod, eventually

CLASSES = ("128", "256")  # page_tokens: pods of different page size refuse each other
MAX_QUEUE = 32  # of each pod
LONGEST_TOKENS = 4000  # of an answer; a decode pod of the first class has pages for eight of them


@dataclass
class Outcome:
    """What one streaming client saw. ``error`` is an HTTP status or an error event's code."""

    text: str = ""
    done: bool = False
    error: str = ""
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return self.done and not self.error


@dataclass
class Fleet:
    """``pairs[i]`` has layout class ``CLASSES[i]``. ``listed`` pods are in the file, some as draining."""

    pairs: list[Pair]
    router: Pod
    file: Path
    listed: dict[str, tuple[str, str]] = field(default_factory=dict)  # address: role, state
    answers: dict[str, str] = field(default_factory=dict)  # by prompt, for tests to compare with

    @classmethod
    def create(cls, folder: Path, model_dir: Path, **router: str) -> Fleet:
        file = folder / "pods.yaml"
        discovery = {"discovery": "file", "discovery_file": str(file)}
        pairs = [
            Pair.create(
                folder / f"class{page}",
                model_dir,
                {"UCX_TLS": "tcp"},
                page_tokens=page,
                debug_fill="nan",
                drain_s="20",
                max_queue=str(MAX_QUEUE),
                max_running="64",
                decode_num_pages="256",
                **{f"decode_{name}": value for name, value in discovery.items()},
            )
            for page in CLASSES
        ]
        settings = {"model_dir": str(model_dir), "refresh_s": "0.2", **discovery, **router}
        fleet = cls(pairs, Pod("router", settings, folder / "router.log"), file)
        for pair in pairs:
            fleet.list_pair(pair)
        return fleet

    @property
    def pods(self) -> list[Pod]:
        return [pod for pair in self.pairs for pod in (pair.prefill, pair.decode)]

    def start(self) -> None:
        for pod in [*self.pods, self.router]:
            pod.start()

    def stop(self) -> None:
        for pod in [self.router, *self.pods]:
            if pod.alive():
                pod.thaw()
                pod.kill()

    def list_pair(self, pair: Pair, state: str | None = "ready") -> None:
        """Write the file anew, with this pair in this state or (None) without it."""
        self._list((pair.prefill, pair.decode), state)

    def list_pod(self, pod: Pod, state: str | None = "ready") -> None:
        """The same for one pod."""
        self._list((pod,), state)

    def _list(self, pods: Iterable[Pod], state: str | None) -> None:
        for pod in pods:
            self.listed.pop(pod.address, None)
            if state is not None:
                self.listed[pod.address] = (pod.role, state)
        entries = [
            {"role": role, "address": address, "state": state}
            for address, (role, state) in self.listed.items()
        ]
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(entries))
        os.replace(new, self.file)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=f"http://{self.router.address}", trust_env=False, timeout=60, limits=limits
        ) as http:
            yield http

    async def ready(self, *pairs: Pair, timeout_s: float = 90.0) -> None:
        """The router would use exactly these pairs."""
        expected = {(pair.decode.address, pair.prefill.address) for pair in pairs}
        async with self.client() as http:

            async def look() -> bool:
                for pod in [*self.pods, self.router]:
                    assert pod.alive(), f"{pod.role} exited:\n{pod.log_tail()}"
                try:
                    body = (await http.get("/ready")).json()
                except httpx.TransportError:
                    return False
                seen = {(pair["decode"], pair["prefill"]) for pair in body["pairs"]}
                return seen == expected

            await eventually(look, timeout_s, f"the router has the pairs {expected}", every_s=0.2)

    async def baseline(self) -> None:
        for pair in self.pairs:
            await pair.baseline(20.0)

    def attempts(self) -> list[tuple[str, str]]:
        """(decode, prefill) of every attempt the router has started, from its log."""
        return [(line["decode"], line["prefill"]) for line in self._logged("attempt_started")]

    def retried(self) -> list[str]:
        """The error's code of every attempt that the router has followed by another one, from its log."""
        return [line["code"] for line in self._logged("attempt_retried")]

    def _logged(self, event: str) -> list[dict[str, str]]:
        found = re.findall(rf'\{{[^\n]*"{event}"[^\n]*\}}', self.router.log_file.read_text())
        return [json.loads(line) for line in found]


async def stream(
    http: httpx.AsyncClient, prompt: str, max_tokens: int, timeout_s: float = 30.0
) -> Outcome:
    """One greedy streamed completion, as a client sees it."""
    outcome, began = Outcome(), time.monotonic()
    body = {
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "timeout_s": timeout_s,
    }
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            outcome.error = str(response.status_code)
            await response.aread()
        else:
            async for line in response.aiter_lines():
                _take(outcome, line)
    outcome.seconds = time.monotonic() - began
    return outcome


async def streams(
    fleet: Fleet, prompts: Iterable[str], max_tokens: int, at_once: int, timeout_s: float = 30.0
) -> list[Outcome]:
    """Outcomes in the order of ``prompts``."""
    gate = asyncio.Semaphore(at_once)
    async with fleet.client() as http:

        async def one(prompt: str) -> Outcome:
            async with gate:
                return await stream(http, prompt, max_tokens, timeout_s)

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


def _take(outcome: Outcome, line: str) -> None:
    if not line:
        return
    assert line.startswith("data: "), line
    assert not outcome.done, "an event after [DONE]"
    data = line.removeprefix("data: ")
    if data == "[DONE]":
        outcome.done = True
        return
    event = json.loads(data)
    if "error" in event:
        outcome.error = event["error"]["code"]
    else:
        assert not outcome.error, "text after an error"
        outcome.text += "".join(choice["text"] for choice in event["choices"])
