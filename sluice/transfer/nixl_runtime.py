"""Finding and taming the NIXL wheel: which package, which environment, and an agent that idles when idle."""

from __future__ import annotations

import importlib
import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from sluice.errors import ConfigError
from sluice.transfer.ucx_log import settings

# How long the target's progress thread sleeps in poll() when nothing happens. Traffic wakes it by file descriptor;
# the wheel's Python wrapper hard-codes 0, which is a busy loop of one whole core per agent.
PROGRESS_DELAY_US = 20_000

_ANY_WHEEL = ("nixl_cu13", "nixl_cu12", "nixl_rocm")
# Guards the swap of the wheel's config class, which is process-wide.
_CONSTRUCTION = threading.Lock()


def load_nixl(cuda_major: int | None) -> ModuleType:
    """The ``_api`` module of the wheel for this CUDA version; for host memory, of whichever is installed.

    Raises ``ConfigError`` when none is.
    """
    _quiet_environment()
    packages = _ANY_WHEEL if cuda_major is None else (f"nixl_cu{cuda_major}",)
    raises = logging.raiseExceptions
    try:
        for package in packages:
            try:
                return importlib.import_module(f"{package}._api")
            except ModuleNotFoundError as error:
                if error.name not in (package, f"{package}._api"):
                    raise
    finally:
        logging.raiseExceptions = raises  # the wheel clears it for the whole process
    raise ConfigError(
        f"no NIXL package found (tried {', '.join(packages)})",
        remedy="pip install nixl, or choose the loopback plane inside one process",
    )


def _quiet_environment() -> None:
    """NIXL and UCX read these once, at load, and would print to stdout without them."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_LEVEL", "error")


def create_agent(api: ModuleType, agent_name: str, *, progress_thread: bool) -> Any:
    """A NIXL agent with the UCX backend, or ``ConfigError``.

    STRICT synchronisation is a seat belt: one thread makes all calls, and without it a second one is a segfault.
    """
    config = api.nixl_agent_config(
        backends=[],  # a missing backend named here is only a warning; create_backend raises
        enable_prog_thread=progress_thread,
        sync_mode=api.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
    )
    try:
        # An initiator's log says what it writes with; a target's goes to stderr.
        with settings(captured=not progress_thread):
            with _event_driven_progress(api):
                agent = api.nixl_agent(agent_name, config)
            agent.create_backend("UCX", {"num_workers": "1"})
    except Exception as error:
        raise ConfigError(
            f"NIXL cannot start its UCX backend: {type(error).__name__}: {error}",
            remedy="run with NIXL_LOG_LEVEL=INFO for the reason; UCX_TLS must contain tcp",
        ) from error
    assert "UCX" in agent.backends
    return agent


@contextmanager
def _event_driven_progress(api: ModuleType) -> Iterator[None]:
    """Give the config object that the wrapper makes a ``pthrDelay`` which can't be set to 0."""
    bindings: Any = importlib.import_module(api.__name__.replace("._api", "._bindings"))
    base = bindings.nixlAgentConfig

    class EventDriven(base):  # type: ignore[misc, valid-type]
        @property
        def pthrDelay(self) -> int:
            return int(base.pthrDelay.__get__(self))

        @pthrDelay.setter
        def pthrDelay(self, _value: int) -> None:
            base.pthrDelay.__set__(self, PROGRESS_DELAY_US)

    with _CONSTRUCTION:
        bindings.nixlAgentConfig = EventDriven
        try:
            yield
        finally:
            bindings.nixlAgentConfig = base
