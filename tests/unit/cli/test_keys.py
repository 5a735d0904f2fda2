"""``sluice keys``: what it prints opens the router, and a file of lines is checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.apikeys import ApiKeys
from sluice.cli.__main__ import main


def test_a_new_key_is_in_the_line_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keys", "new", "alice", "--max-concurrent", "2", "--operator"]) == 0
    secret, line = (row.strip() for row in capsys.readouterr().out.splitlines() if row[:1] == " ")
    (tmp_path / "keys").write_text(line)
    key = ApiKeys(tmp_path / "keys").find(secret)
    assert key is not None
    assert (key.name, key.max_concurrent, key.operator) == ("alice", 2, True)
    assert secret not in line
    assert main(["keys", "check", str(tmp_path / "keys")]) == 0
    assert "alice: operator, 2 at once\n1 keys" in capsys.readouterr().out


@pytest.mark.parametrize(
    "command", [["new", "a b"], ["new", "a", "--max-concurrent", "0"], ["check", "none"]]
)
def test_bad_wishes_are_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", *command]) == 2
    assert "ConfigError" in capsys.readouterr().err
