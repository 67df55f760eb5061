"""Sweeps: which runs, under which names, and what happens when one fails or all are stopped."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import yaml

from simpro_fast.cli.sweep import folder_name, members_of
from simpro_fast.config import Config, flatten, load_config
from simpro_fast.config.methods import SimProConfig
from simpro_fast.distributed.stop_requests import launchers_above
from tests import processes
from tests.conftest import TINY, TRAIN
from tests.processes import PATIENCE

Run = Callable[..., "CompletedProcess[str]"]

# Stands for the training command where only what the sweep does with it matters: it ends with the
# code 3 for tau 2, waits for a signal at tau 9 and ends as a run that was asked to stop.
STAND_IN = """
import json, os, pathlib, signal, sys, time
keys = dict(word.split("=") for word in sys.argv[3:])
folder = pathlib.Path(keys["output_dir"], keys["name"], "seed" + keys["seed"])
folder.mkdir(parents=True)
with open("log", "a") as log:
    log.write(folder.name + " " + folder.parent.name + " " + os.environ.get("RANK", "-") + "\\n")
tau = keys["method.tau"]
if tau == "2":
    sys.exit(3)
if tau == "9":
    for number, code in ((signal.SIGTERM, 75), (signal.SIGINT, 130)):
        signal.signal(number, lambda n, f, code=code: sys.exit(code))
    (folder / "waits").touch()
    time.sleep(60)
summary = dict.fromkeys(("top1", "per_class", "pi_u"))
summary |= {"name": "", "seed": 1, "method": "", "steps": 12, "class_names": ["a"]}
(folder / "summary.json").write_text(json.dumps(summary))
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY))
    return path


@pytest.fixture
def stand_in(tmp_path: Path, config_file: Path) -> list[str]:
    """Arguments of `train` with a stand-in as launcher; finished runs are in `<tmp_path>/runs`."""
    script = tmp_path / "stand_in.py"
    script.write_text(STAND_IN)
    launcher = shlex.join([sys.executable, "-I", "-S", str(script)])
    return ["--config", str(config_file), "output_dir=runs", "--launcher", launcher]


def wait_for(path: Path, process: Any, seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert process.exitcode is None, f"ended before {path} was there"
        assert time.monotonic() < deadline, path
        time.sleep(0.02)


def log(folder: Path) -> list[str]:
    return (folder / "log").read_text().splitlines()


def test_members_are_the_product_and_the_first_seed_comes_first() -> None:
    grid = ["method.threshold=0.5,0.7", "method.tau=1,2.0"]
    found = members_of("digits_lt/reversed", grid, "3,1", ["train.steps=50"])
    assert [str(member) for member in found] == [
        f"digits_lt/reversed/method.tau-{tau}/method.threshold-{threshold} seed {seed}"
        for seed in (3, 1)
        for tau in (1, 2)
        for threshold in (0.5, 0.7)
    ]
    last = found[-1]
    command = last.command(["train"])
    assert command[:3] == ["train", "--config", "digits_lt/reversed"]
    assert flatten(load_config(command[2], command[3:])) == flatten(last.config)
    assert isinstance(last.config.method, SimProConfig)
    assert (last.config.train.steps, last.config.method.tau) == (50, 2.0)
    again = members_of("digits_lt/reversed", grid[::-1], "3", ["train.steps=50"])
    assert [str(m) for m in again] == [str(m) for m in found[:4]], "the order of flags is no name"


def test_seeds_alone_leave_the_name() -> None:
    found = members_of("digits_lt/reversed", [], "1,2", [])
    assert [str(m) for m in found] == ["digits_lt/reversed seed 1", "digits_lt/reversed seed 2"]


def test_every_value_has_a_folder_of_its_own() -> None:
    values: list[Any] = [
        *(1, 10, 1.5, -1.5, 1e-05, 1e20, True, None, "auto", "wrn_28_2", "a/b", "a.b", "a b", ""),
        *([0.2, 1.0], [0.21, 0.0], "ä", "ö", "x" * 300, "x" * 301, "..", "a\nb"),
    ]
    names = [folder_name("data.root", value) for value in values]
    assert len(set(names)) == len(names)
    pattern = str(Config.model_fields["name"].metadata[0].pattern)
    assert all(re.fullmatch(pattern, name) and len(name) < 255 for name in names)
    assert folder_name("method.tau", 1.0) == folder_name("method.tau", 1) == "method.tau-1"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--grid", "method.tua=1,2"], "unknown key 'method.tua'; did you mean 'method.tau'?"),
        (["--grid", "method.tau=1,high"], "method.tau='high'"),
        (["--grid", "method.tau=1,1.0"], "method.tau-1 seed 1; leave one value out"),
        (["--grid", "method.tau"], "key.sub=a,b,c"),
        (["--grid", "method.tau="], "has no value"),
        (["--grid", "method.tau=[1"], "not valid YAML"),
        (["--grid", "method={tau: 1}"], "is a section"),
        (["--grid", "method.tau=1", "--grid", "method.tau=2"], "a key twice"),
        (["--grid", "method.tau=1", "method.tau=2"], "keep one"),
        (["--grid", "seed=1,2"], "use --seeds"),
        (["--grid", "name=a,b"], "a name of its own"),
        (["--seeds", "1,x"], "whole numbers"),
        (["--seeds", "1,2", "seed=3"], "keep one"),
        (["--seeds", "1,2", "--dry-run"], "--dry-run is for one run"),
        (["--seeds", "1", "--launcher", "'x"], "No closing quotation"),
        (["--seeds", "1", "--launcher", "no-such-launcher"], "cannot be started"),
    ],
)
def test_nothing_is_trained_when_anything_is_wrong(
    train_command: Run, config_file: Path, tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = train_command(str(config_file), *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and said in line
    assert not (tmp_path / "runs").exists()


def test_several_ranks_are_refused_with_the_cure(train_command: Run, config_file: Path) -> None:
    said = []
    for rank in ("0", "1"):
        env = {"WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank}
        done = train_command(str(config_file), "--seeds", "1,2", env=env)
        assert done.returncode == 2
        said.append(done.stderr)
    assert "--launcher 'deepspeed --num_gpus 8 launch/train.py'" in said[0]
    assert said[1] == ""


def test_a_failure_does_not_stop_the_rest(
    train_command: Run, stand_in: list[str], tmp_path: Path
) -> None:
    """Listed at the end; the next start tries it again, and leaves what is finished alone."""
    arguments = [*stand_in, "--grid", "method.tau=1,2,3", "--seeds", "1"]
    done = train_command(*arguments, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert done.returncode == 1
    said = "error: 1 of 3 runs failed:\n  tiny/method.tau-2 seed 1 (exit code 3)\n"
    assert done.stderr.endswith(said)
    assert log(tmp_path) == [f"seed1 method.tau-{tau} -" for tau in (1, 2, 3)], "no rank is left"
    left = train_command(*arguments, "--print-commands")
    assert left.returncode == 0
    (command,) = left.stdout.splitlines()
    assert "method.tau=2" in command and "1 of 3 runs to train" in left.stderr
    (tmp_path / "runs/tiny/method.tau-2/seed1").rmdir()
    assert train_command(*arguments).returncode == 1
    assert log(tmp_path)[3:] == ["seed1 method.tau-2 -"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_the_member_and_the_sweep(
    stand_in: list[str], tmp_path: Path, number: int, code: int
) -> None:
    output = tmp_path / "said"
    arguments = [*stand_in, "--grid", "method.tau=9,1", "--seeds", "1"]
    process = processes.start(processes.script, TRAIN, arguments, output=output, folder=tmp_path)
    wait_for(tmp_path / "runs/tiny/method.tau-9/seed1/waits", process)
    os.kill(int(process.pid or 0), number)
    done = processes.finish(process, output)
    assert done.returncode == code, done.stderr
    assert "the same command goes on from there" in done.stderr
    assert log(tmp_path) == ["seed1 method.tau-9 -"], "nothing was started after it"


@pytest.mark.slow
def test_four_runs_stopped_and_continued(
    train_command: Run, config_file: Path, tmp_path: Path
) -> None:
    """Really trained: SIGTERM within the second; it keeps its checkpoint, and the rest follows."""
    output = tmp_path / "said"
    arguments = [str(config_file), "--grid", "train.steps=10,200", "--seeds", "1,2"]
    process = processes.start(processes.script, TRAIN, arguments, output=output, folder=tmp_path)
    long = tmp_path / "runs/tiny/train.steps-200"
    wait_for(long / "seed1/metrics.jsonl", process)
    os.kill(int(process.pid or 0), signal.SIGTERM)
    stopped = processes.finish(process, output)
    assert stopped.returncode == 75, stopped.stderr
    (saved,) = re.findall(r"checkpoint of step (\d+) is saved", stopped.stderr)
    assert (long / f"seed1/checkpoints/step_{int(saved):09d}.pt").is_file()
    assert not (long / "seed2").exists()

    done = train_command(*arguments)
    assert done.returncode == 0, done.stderr
    assert "sweep of 4 runs, 1 finished before" in done.stdout
    assert f"at step {saved}" in done.stdout, "it went on, and did not begin again"
    steps = {
        str(path.parent.relative_to(tmp_path / "runs/tiny")): json.loads(path.read_text())["steps"]
        for path in tmp_path.rglob("summary.json")
    }
    assert steps == {f"train.steps-{n}/seed{seed}": n for n in (10, 200) for seed in (1, 2)}
    again = train_command(*arguments)
    assert again.returncode == 0
    assert "sweep of 4 runs, 4 finished before" in again.stdout


def test_a_member_follows_its_sweep_into_death(tmp_path: Path) -> None:
    """A sweep stands above its members as a launcher does."""
    script = tmp_path / "launch" / "train.py"
    script.parent.mkdir()
    script.write_text("import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]])")
    code = (
        "import os; from simpro_fast.distributed.stop_requests import launchers_above;"
        "assert [p.pid for p in launchers_above()] == [os.getppid()]; print('above')"
    )
    done = subprocess.run(
        [sys.executable, str(script), code, "--seeds=1,2"], capture_output=True, text=True
    )
    assert done.stdout == "above\n", done.stderr
    assert launchers_above() == []
