"""The command itself: help, exit codes, typed errors as one line."""

from __future__ import annotations

import socket

import pytest

from sluice.cli.__main__ import build_parser, main


@pytest.mark.parametrize("command", ["up", "ab", "layout", "explain", "pair", "preflight"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "usage: sluice " + command in capsys.readouterr().out


def test_no_command_is_an_error() -> None:
    with pytest.raises(SystemExit) as ended:
        build_parser().parse_args([])
    assert ended.value.code == 2


def test_a_typed_error_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--model", "no-such-model", "--port", "0"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ConfigError: ")
    assert "no-such-model" in err
    assert "Traceback" not in err


def test_a_taken_port_is_named_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert main(["up", "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in err
    assert "--port" in err
