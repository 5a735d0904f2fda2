"""Session-wide rules: one thread a process, no skips in CI, no process left behind."""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Generator

# Before anything imports torch, numpy or UCX: they read these once. Child processes inherit them.
for _name, _value in {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
    "UCX_NET_DEVICES": "lo",
}.items():
    os.environ.setdefault(_name, _value)

import hypothesis
import psutil
import pytest

# Time limits of single examples only measure how busy the machine is; CI draws the same examples.
hypothesis.settings.register_profile(
    "sluice",
    deadline=None,
    derandomize=os.environ.get("CI") == "true",
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("sluice")

# Every process that a test starts, however deep, inherits this variable with this session's value.
_TAG_NAME = "PYTEST_SESSION_TAG"
_TAG = uuid.uuid4().hex
_EXIT_GRACE_S = 3.0
_LEFTOVERS: pytest.StashKey[list[str]] = pytest.StashKey()


def pytest_configure(config: pytest.Config) -> None:
    os.environ[_TAG_NAME] = _TAG
    if (torch := sys.modules.get("torch")) is not None:  # a plugin was quicker than the variables
        torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        marker = item.get_closest_marker("optional")
        if marker is not None and not _optional_reason(item):
            raise pytest.UsageError(f"{item.nodeid}: the optional marker needs a reason")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not _optional_reason(item):
        _fail_skip_in_ci(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped:
        _fail_skip_in_ci(report)
    return report


def _optional_reason(item: pytest.Item) -> str:
    marker = item.get_closest_marker("optional")
    if marker is None:
        return ""
    return str(marker.kwargs.get("reason") or (marker.args[0] if marker.args else ""))


def _fail_skip_in_ci(report: pytest.TestReport | pytest.CollectReport) -> None:
    """A skip in CI would hide that a test did not run."""
    if os.environ.get("CI") == "true":
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"skipped in CI without an optional marker: {reason}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    running = _running_children()
    _, running = psutil.wait_procs(running, timeout=_EXIT_GRACE_S)
    described = []
    for process in running:
        try:
            described.append(f"{process.pid}: {' '.join(process.cmdline())}")
            process.kill()
        except psutil.Error:
            continue
    session.config.stash[_LEFTOVERS] = described
    if described:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    leftovers = config.stash.get(_LEFTOVERS, [])
    if leftovers:
        terminalreporter.section("FAILED: processes left behind by tests (killed now)", red=True)
        for line in leftovers:
            terminalreporter.line(line)


def _running_children() -> list[psutil.Process]:
    """Processes started by this session and still running, orphaned grandchildren included."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.pid != os.getpid() and process.environ().get(_TAG_NAME) == _TAG
            zombie = process.status() == psutil.STATUS_ZOMBIE
            # multiprocessing's own helper lives until this process ends.
            helper = "multiprocessing.resource_tracker" in " ".join(process.cmdline())
        except psutil.Error:
            continue
        if ours and not zombie and not helper:
            found.append(process)
    return found
