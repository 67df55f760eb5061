"""`watch`: every state of a run by its name, from files; live on a real terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from simpro_fast.cli import watch
from simpro_fast.config import Config, dump_config
from simpro_fast.distributed.failure_notes import Failure
from simpro_fast.distributed.heartbeat import Heartbeats
from simpro_fast.run.live import SILENT_SECONDS
from simpro_fast.run.lock import lock_path
from tests import processes
from tests.answers.report.small_runs import make_summary
from tests.conftest import COMMAND, TINY, TRAIN
from tests.processes import PATIENCE

MakeConfig = Callable[..., Config]
HERE = socket.gethostname()


@pytest.fixture
def run(tiny: MakeConfig) -> Config:
    """A run of ten classes after its second period, that nobody trains."""
    config = tiny()
    folder = config.run_dir
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(dump_config(config))
    counts = [10, 11, 13, 15, 18, 21, 25, 29, 34, 40]
    names = [str(k) for k in range(9)] + ["evil\x1b[31m"]
    write_split(folder, names, counts)
    row = {
        **{"step": 5, "loss": 1.5, "top1": 31.0, "kl_pi_u": 0.25, "mask_rate": 0.5},
        **{"pi_u": [0.1] * 10, "images_per_second": 400.0, "data_wait_fraction": 0.25},
    }
    rows = [row, {**row, "step": 10, "loss": None, "top1": 42.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return config


def write_split(folder: Path, names: list[str], unlabeled: list[int] | None) -> None:
    split = {
        **{"dataset": "digits", "class_names": names, "overlap": False, "hash": "0"},
        **{"num_labeled": 1, "num_unlabeled": 1, "num_test": 0, "unlabeled_counts": unlabeled},
        **dict.fromkeys(("labeled_counts", "test_counts"), [1] * len(names)),
    }
    (folder / "split.json").write_text(json.dumps(split))


def once(config: Config, capsys: pytest.CaptureFixture[str]) -> str:
    assert watch.main([str(config.run_dir)]) == 0
    return capsys.readouterr().out


def beat(config: Config, **changes: Any) -> Path:
    heartbeats = Heartbeats(config.run_dir / "heartbeats", 0, 1)
    heartbeats.beat(7, "training")
    path = config.run_dir / "heartbeats/rank0.json"
    content = {**json.loads(path.read_text()), **changes}
    path = path.with_name(f"rank{content['rank']}.json")
    path.write_text(json.dumps(content))
    return path


def test_one_frame_holds_what_the_files_say(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(run, step=11)
    shown = once(run, capsys)
    # 8 labeled images x 2 views + 16 unlabeled x 3, so 64 views a step: one step at 400 a second
    assert "tiny seed 1, SimPro: running\n" in shown
    assert "step 11 of 12 (92 %)  ETA 00:00" in shown
    assert "400 images/s  data wait 25 %" in shown
    assert "loss - (labeled -" in shown, "a value that is missing"
    assert "top-1 42.0 % at step 10, best 42.0 % at step 10" in shown
    assert re.search(r"^  0 +4\.6 % +10\.0 % █+│█+$", shown, re.MULTILINE), shown
    assert "evil\\x1b[31m" in shown and "\x1b" not in shown
    assert "KL(true || pi_u) 0.250 nats (a uniform guess: 0.098)" in shown
    assert f"0 on {HERE}, process {os.getpid()}: training, step 11" in shown


def test_states_have_names(run: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.run_dir
    assert "SimPro: stale: no process trains here; start its command again" in once(run, capsys)
    lock_path(folder).write_text(f"process {os.getpid()} on {HERE}\n")
    assert "stale" in once(run, capsys), "another process got the number of the one that has ended"
    with lock_path(folder).open():
        assert "SimPro: starting\n" in once(run, capsys)
    beat(run, pid=2**22 - 1)
    shown = once(run, capsys)
    assert "SimPro: stale: its processes have ended without a word: killed?" in shown
    assert "gone" in shown
    end = Failure.of(0, 11, "error", "disk full", 1).model_dump()
    (folder / "ended.json").write_text(json.dumps(end))
    assert "SimPro: failed: disk full" in once(run, capsys)
    assert "step 11 of 12" in once(run, capsys)
    end |= {"kind": "preempted", "message": "preempted (SIGTERM): checkpoint of step 11 is saved"}
    (folder / "ended.json").write_text(json.dumps(end))
    assert "SimPro: preempted (SIGTERM): checkpoint of step 11 is saved\n" in once(run, capsys)
    (folder / "ended.json").unlink()
    (folder / "failures").mkdir()
    (folder / "failures/rank1.json").write_text(
        Failure.of(1, 9, "stalled", "slow", 1).model_dump_json()
    )
    assert "SimPro: failed: slow" in once(run, capsys), "where rank 0 could not say it"
    (folder / "summary.json").write_text(json.dumps(make_summary(10, steps=12)))
    assert "SimPro: finished\n" in once(run, capsys)


def test_a_finished_run_without_metrics_has_the_steps_of_its_summary(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = run.train.steps
    (run.run_dir / "metrics.jsonl").unlink()
    (run.run_dir / "summary.json").write_text(json.dumps(make_summary(10, steps=steps)))
    said = once(run, capsys)
    assert "finished\n" in said and f"step {steps} of {steps} (100 %)" in said
    assert "metrics.jsonl is missing, so there are no numbers" in said


def test_ranks_elsewhere_live_by_their_beats(
    run: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(run, host="node1")
    silent = beat(run, host="node2", rank=1)
    os.utime(silent, (time.time() - 2 * SILENT_SECONDS,) * 2)
    shown = once(run, capsys)
    assert "SimPro: running: rank(s) 1 without a sign of life" in shown
    assert "ranks: 1 of 2 live" in shown
    assert re.search(r"^  1 on node2, .* 120 s ago, gone$", shown, re.MULTILINE)


def test_before_the_first_period_and_with_many_classes(
    run: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("LINES", "24")
    folder = run.run_dir
    write_split(folder, [f"class {k}" for k in range(1000)], None)
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 5, "pi_u": [0.001] * 1000}))
    shown = once(run, capsys)
    assert len(shown.splitlines()) < 24 and max(map(len, shown.splitlines())) <= 60
    assert "class 0 .. class 82" in shown and "8.3 %" in shown
    (folder / "metrics.jsonl").unlink()
    assert "no period is complete yet" in once(run, capsys)


def test_what_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code, part in (
        ([str(tmp_path)], 1, "no config.yaml"),
        ([str(tmp_path / "no")], 1, "no such folder"),
        ([], 2, "for example"),
        ([str(tmp_path), "--interval", "0"], 2, "'0' is no number of seconds from 0.1 to 3600"),
    ):
        assert watch.main(arguments) == code
        (line,) = capsys.readouterr().err.splitlines()
        assert part in line


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
        termios.tcsetwinsize(self._slave, (40, 100))
        self.name, self.text = os.ttyname(self._slave), ""

    def wait_for(self, part: str, seconds: float = PATIENCE) -> None:
        deadline = time.monotonic() + seconds
        while part not in self.text:
            assert time.monotonic() < deadline, self.text[-3000:]
            if select.select([self.master], [], [], 0.2)[0]:
                content = os.read(self.master, 65536).decode(errors="replace")
                self.text += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", content)


def test_live_until_the_run_ends(tmp_path: Path) -> None:
    """A real run: watched while it trains, then stopped."""
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    arguments = ["tiny.yaml", "train.steps=100000", "checkpoint.every=100000"]
    output = tmp_path / "said"
    training = processes.start(processes.script, TRAIN, arguments, output=output, folder=tmp_path)
    folder, deadline = tmp_path / "runs/tiny/seed1", time.monotonic() + PATIENCE
    while not (folder / "metrics.jsonl").exists():
        assert training.exitcode is None and time.monotonic() < deadline
        time.sleep(0.05)
    screen = Screen()
    command = ["watch", str(folder), "--interval", "0.2"]
    watching = processes.start(on_terminal, screen.name, COMMAND, command)
    screen.wait_for("tiny seed 1, SimPro: running")
    screen.wait_for("ranks: 1 of 1 live")
    os.kill(int(training.pid or 0), signal.SIGTERM)
    screen.wait_for("SimPro: preempted (SIGTERM): checkpoint of step")
    assert processes.finish(training, output).returncode == 75
    watching.join(PATIENCE)
    assert watching.exitcode == 0


def test_output_that_is_no_terminal_is_plain(run: Config) -> None:
    done = processes.run(processes.script, COMMAND, ["watch", str(run.run_dir)])
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout and done.stdout.startswith("tiny seed 1, SimPro: stale")
