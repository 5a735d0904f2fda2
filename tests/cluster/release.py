"""The chart as one release on the test node: Helm, kubectl, the router's Service, and load on it."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy/helm/sluice"
TOOLS = ROOT / ".cache/helm"
NAMESPACE, NAME = "models", "rel"
VALUES = (CHART / "values-cpu.yaml", Path(__file__).parent / "node-values.yaml")


@dataclass(frozen=True)
class PodOnNode:
    name: str
    ip: str
    role: str
    layout: str  # the label that the tests set with each layout
    ready: bool
    leaving: bool
    restarts: int


class Release:
    """``rel`` in namespace ``models``."""

    def helm(self, *words: str, program: str = "helm4") -> str:
        return _run(str(TOOLS / program), "--namespace", NAMESPACE, *words)

    def kubectl(self, *words: str) -> str:
        return _run(str(TOOLS / "kubectl"), "--namespace", NAMESPACE, *words)

    def install(self, *settings: str) -> None:
        self.helm("install", NAME, str(CHART), "--create-namespace", *self._words(settings))

    def upgrade(self, *settings: str, timeout: str = "8m") -> None:
        self.helm("upgrade", NAME, str(CHART), *self._words(settings, timeout))

    def _words(self, settings: tuple[str, ...], timeout: str = "8m") -> list[str]:
        words = ["--wait", "--timeout", timeout]
        for file in VALUES:
            words += ["--values", str(file)]
        for setting in settings:
            words += ["--set", setting]
        return words

    def pods(self, role: str = "") -> list[PodOnNode]:
        selector = f"app.kubernetes.io/instance={NAME}"
        selector += f",app.kubernetes.io/component={role}" if role else ""
        items = json.loads(self.kubectl("get", "pods", "-l", selector, "-o", "json"))["items"]
        pods = [_pod(item) for item in items]
        return [pod for pod in pods if pod.role != "test"]  # helm test's stays until the next one

    def url(self) -> str:
        """The Service's cluster IP: through kube-proxy, as any client in the cluster."""
        words = ("get", "service", f"{NAME}-sluice-router", "-o", "jsonpath={.spec.clusterIP}")
        return f"http://{self.kubectl(*words)}"

    def wait(self, condition: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not _holds(condition):
            assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {what}"
            time.sleep(1.0)


def _holds(condition: Callable[[], bool]) -> bool:
    """A command that fails, on a container that is only coming up say, is not yet."""
    try:
        return condition()
    except (AssertionError, httpx.HTTPError):
        return False


def complete(url: str, max_tokens: int = 16, timeout_s: float = 120.0) -> str:
    """A streamed completion's text. Raises unless it ends as it should."""
    body = {"prompt": "And it came to pass", "max_tokens": max_tokens, "stream": True}
    body |= {"ignore_eos": True, "temperature": 0}
    text, done, finished = "", False, False
    with httpx.stream(
        "POST", f"{url}/v1/completions", json=body, timeout=timeout_s, trust_env=False
    ) as answer:
        if answer.status_code != 200:
            raise AssertionError(f"HTTP {answer.status_code}: {answer.read().decode()}")
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                done = True
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    text += choice["text"]
                    finished = finished or choice["finish_reason"] == "length"
    assert done, "the stream ended early"
    assert finished, "the stream has no finish reason"
    return text


@dataclass
class Load:
    """Streams until told to stop. ``errors`` holds every one that a client saw."""

    url: str
    clients: int = 2
    max_tokens: int = 16
    done: int = 0
    errors: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[Load]:
        threads = [threading.Thread(target=self._work) for _ in range(self.clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _work(self) -> None:
        while not self._stop.is_set():
            try:
                complete(self.url, self.max_tokens)
                self.done += 1
            except (AssertionError, httpx.HTTPError) as error:
                self.errors.append(repr(error))
                time.sleep(0.5)


def _pod(item: dict[str, Any]) -> PodOnNode:
    labels, status = item["metadata"]["labels"], item["status"]
    return PodOnNode(
        name=item["metadata"]["name"],
        ip=status.get("podIP", ""),
        role=labels["app.kubernetes.io/component"],
        layout=labels.get("layout", ""),
        ready=any(
            c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", ())
        ),
        leaving="deletionTimestamp" in item["metadata"],
        restarts=sum(c["restartCount"] for c in status.get("containerStatuses", ())),
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done.stdout
