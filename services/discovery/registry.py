"""The pods of a fleet as discovery knows them: one versioned view, replaced whole, heard of at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from sluice.telemetry.logging import get_logger
from sluice.types import Role

_log = get_logger(__name__)


class PodState(Enum):
    """What discovery says of a pod. A pod that is gone is in no view any more."""

    STARTING = "starting"  # it exists, and its platform doesn't call it ready (yet, or any more)
    READY = "ready"
    DRAINING = "draining"  # it finishes what it has and takes nothing new


@dataclass(frozen=True)
class PodRecord:
    """``address`` is host:port of its gRPC; ``name`` is for people."""

    role: Role
    address: str
    state: PodState = PodState.READY
    name: str = ""


@dataclass(frozen=True)
class RegistryView:
    """``version`` grows with every change of ``pods``, 0 = nobody has looked yet.

    ``problem``: why the view may be old, or empty.
    """

    version: int = 0
    pods: tuple[PodRecord, ...] = ()
    problem: str = ""

    def of(self, role: Role) -> dict[str, PodRecord]:
        """Pods of one role by address."""
        return {pod.address: pod for pod in self.pods if pod.role is role}


Listener = Callable[[RegistryView], None]


class Registry:
    """The current view. All methods run on the event loop.

    A listener has run before ``replace`` returns: nobody acts on a pod that a source has already called gone.
    """

    def __init__(self) -> None:
        self._view = RegistryView()
        self._listeners: list[Listener] = []

    @property
    def view(self) -> RegistryView:
        return self._view

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` with the view now and after every change."""
        self._listeners.append(listener)
        listener(self._view)

    def replace(self, pods: Iterable[PodRecord]) -> None:
        """A source knows all pods again. Of several records of one address and role the last counts."""
        unique = {(pod.role, pod.address): pod for pod in pods}
        found = tuple(sorted(unique.values(), key=lambda pod: (pod.role.value, pod.address)))
        if found != self._view.pods or not self._view.version:
            self._log(found)
            self._set(RegistryView(self._view.version + 1, found))
        elif self._view.problem:
            self._set(replace(self._view, problem=""))

    def trouble(self, problem: str) -> None:
        """The source can't look: the last good view stays, and says why it may be old."""
        if problem != self._view.problem:
            _log.warning("discovery_trouble", problem=problem)
            self._set(replace(self._view, problem=problem))

    def _set(self, view: RegistryView) -> None:
        self._view = view
        for listener in self._listeners:
            listener(view)

    def _log(self, found: tuple[PodRecord, ...]) -> None:
        before = {(pod.role, pod.address): pod for pod in self._view.pods}
        after = {(pod.role, pod.address): pod for pod in found}
        for key, pod in after.items():
            if before.get(key) != pod:
                _log.info(
                    "pod_seen", pod_role=pod.role.value, address=pod.address, state=pod.state.value
                )
        for key in before.keys() - after.keys():
            _log.info("pod_gone", pod_role=key[0].value, address=key[1])


class Source(Protocol):
    """Where pods are known from. Static, file and Kubernetes implement it."""

    async def watch(self, registry: Registry) -> None:
        """Fill ``registry`` and keep it true until cancelled. Never raises for trouble that may pass."""
        ...


async def keep_watching(source: Source, registry: Registry) -> None:
    """``source.watch``; a bug in it shows as trouble instead of freezing the view without a word."""
    try:
        await source.watch(registry)
    except Exception as error:
        _log.exception("discovery_died")
        registry.trouble(f"discovery died: {type(error).__name__}: {error}")
