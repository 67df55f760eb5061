"""The commands of docs/sweeps.md do what the page says, as far as that costs nothing."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from simpro_fast.cli.train import main
from simpro_fast.config import load_config
from tests.conftest import ROOT

PAGE = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^simpro-fast (train .*)$", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_commands_stand_for_runs_that_load(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    _, *arguments = shlex.split(command)
    assert main([*arguments, *["--print-commands"][: "--print-commands" not in arguments]]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        words = shlex.split(line)
        start = words.index("--config")
        load_config(words[start + 1], words[start + 2 :])
    assert not list(tmp_path.iterdir())


def test_the_name_that_the_page_shows() -> None:
    from simpro_fast.cli.sweep import members_of

    grids = ["method.threshold=0.7", "method.tau=2"]
    (member,) = members_of("digits_lt/reversed", grids, "1", [])
    assert f"`{member.run_dir}`" in PAGE
