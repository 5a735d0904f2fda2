"""UCX's tables, as UCX 1.18 printed them, and what is no table."""

from __future__ import annotations

import logging
import os

import pytest

from sluice.transfer.ucx_log import UcxLog, settings

STAMP = "[1795985363.655603] [vm:20770:0]   "


def table(
    agent: str, scope: str, *rows: tuple[str, str], what: str = "remote memory write by ucp_put*"
) -> str:
    rule = f"{STAMP}+--------+-------------+-----------------------------------+\n"
    return (
        f"{rule}{STAMP}| {agent} {scope} cfg#1                        |\n"
        f"{STAMP}| {what} from host memory to host |\n"
        f"{rule}{STAMP}| Range  | Description |              Config               |\n{rule}"
        + "".join(
            f"{STAMP}| {span} | zero-copy   | {way}                        |\n"
            for span, way in rows
        )
        + rule
    )


def written(log: UcxLog, text: str) -> None:
    with open(log.path, "a") as file:
        file.write(text)


def test_the_row_for_large_writes_counts_and_each_way_once() -> None:
    log = UcxLog()
    assert log.transports("prefill-1") == ()
    written(log, table("prefill-1", "self", ("0..inf", "self/memory")))
    written(log, table("prefill-1", "intra-node", ("0..inf", "cma/memory")) * 2)
    assert log.transports("prefill-1") == ("cma/memory",)
    rows = (("0..2038", "ud_mlx5/mlx5_0:1"), ("2039..inf", "rc_mlx5/mlx5_0:1"))
    written(log, table("prefill-1", "inter-node", *rows))
    assert log.transports("prefill-1") == ("cma/memory", "rc_mlx5/mlx5_0:1")


def test_only_this_agents_writes() -> None:
    log = UcxLog()
    written(log, table("decode-1", "inter-node", ("0..inf", "tcp/lo")))
    read = table(
        "prefill-1", "inter-node", ("0..inf", "tcp/lo"), what="remote memory read by ucp_get*"
    )
    written(log, read)
    assert log.transports("prefill-1") == ()


def test_a_name_that_ucx_cut_is_still_known() -> None:
    log = UcxLog()
    written(log, table("prefill-0123", "inter-node", ("0..inf", "tcp/lo")))
    assert log.transports("prefill-0123456789") == ("tcp/lo",)


def test_a_complaint_is_passed_on(caplog: pytest.LogCaptureFixture) -> None:
    log = UcxLog()
    written(log, f"{STAMP}  tcp_ep.c:12 UCX  ERROR  connection refused\n")
    with caplog.at_level(logging.WARNING, logger="ucx"):
        log.transports("prefill-1")
    assert "connection refused" in caplog.text


def test_half_a_line_waits_for_its_end() -> None:
    log = UcxLog()
    text = table("prefill-1", "inter-node", ("0..inf", "tcp/lo"))
    cut = text.index("tcp/lo") + 3
    written(log, text[:cut])
    assert log.transports("prefill-1") == ()
    written(log, text[cut:])
    assert log.transports("prefill-1") == ("tcp/lo",)


def test_children_do_not_inherit_a_file_they_cannot_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_LOG_FILE", raising=False)
    monkeypatch.delenv("UCX_PROTO_INFO", raising=False)
    with settings(captured=True):
        assert os.environ["UCX_LOG_FILE"].startswith("/proc/self/fd/")
    assert "UCX_LOG_FILE" not in os.environ
    with settings(captured=False):
        assert os.environ["UCX_LOG_FILE"] == "stderr", "not stdout, which is UCX's default"
    assert "UCX_LOG_FILE" not in os.environ


def test_an_operators_own_log_file_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_LOG_FILE", "operators.log")
    with settings(captured=True):
        assert os.environ["UCX_LOG_FILE"] == "operators.log"
        assert "UCX_PROTO_INFO" not in os.environ
