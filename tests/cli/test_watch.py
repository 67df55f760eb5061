"""`watch`: one row for each run, from files, until all are finished."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import sys
import termios
import time
from pathlib import Path

import pytest

from simpro_fast.cli import watch
from tests import processes
from tests.answers.report.made_runs import make_run
from tests.conftest import COMMAND
from tests.processes import PATIENCE


def on_terminal(terminal: str, path: str, arguments: list[str]) -> None:
    """`processes.script` with a terminal as its input and output."""
    device = os.open(terminal, os.O_RDWR)
    for number in range(3):
        os.dup2(device, number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    processes.script(path, arguments)


class Screen:
    """What arrives on a pseudo-terminal."""

    def __init__(self) -> None:
        self.master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (40, 80))
        self.name, self.text = os.ttyname(self._slave), ""

    def wait_for(self, part: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while part not in self.text:
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                content = os.read(self.master, 65536).decode(errors="replace")
                self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", content)


def test_one_row_for_each_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished = make_run(tmp_path / "a/seed1", name="a")
    make_run(tmp_path / "b/seed1", name="evil\x1b[31m", finished=False)
    begun = make_run(tmp_path / "c/seed1", finished=False)
    (begun / "split.json").unlink()
    assert watch.main([str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    first, second, third = shown.splitlines()[1:]
    last = json.loads((finished / "metrics.jsonl").read_text().splitlines()[-1])
    summary = json.loads((finished / "summary.json").read_text())
    assert re.search(rf"^a +1 +SimPro +600/.* finished +{summary['top1']:.1f} ", first), shown
    assert f"{last['mask_rate']:.2f}" in first
    assert re.search(r"^evil\\x1b\[31m .* 600/1200 .* ago ", second), shown
    assert third.split() == [str(begun), "none", "yet"]


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, part in (
        ([str(tmp_path)], 1, "nor a folder with runs in it"),
        ([str(tmp_path / "no")], 1, "no such folder"),
        ([], 2, "for example"),
    ):
        assert watch.main(arguments) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line


def test_on_a_terminal_until_all_are_finished(tmp_path: Path) -> None:
    path = make_run(tmp_path / "a/seed1", finished=False)
    whole = make_run(tmp_path / "other") / "summary.json"
    screen = Screen()
    command = ["watch", str(tmp_path / "a")]
    watching = processes.start(on_terminal, screen.name, COMMAND, command)
    screen.wait_for(" ago")
    whole.rename(path / "summary.json")
    screen.wait_for("finished")
    watching.join(PATIENCE)
    assert watching.exitcode == 0
