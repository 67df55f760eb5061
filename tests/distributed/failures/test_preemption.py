"""Asked to stop: the step ends, the state is saved, the exit code says that it may go on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from simpro_fast.config import Config, dump_config
from simpro_fast.distributed.signals import PREEMPTED
from simpro_fast.distributed.stop_requests import StopRequests, is_launcher
from tests.conftest import TRAIN
from tests.distributed.command_ranks import CommandRanks, newest_step, processes_of
from tests.distributed.outcomes import Outcome, outcome
from tests.processes import PATIENCE, clean_environment, free_port

MakeConfig = Callable[..., Config]


@pytest.mark.parametrize(
    ("number", "to"),
    [
        pytest.param(signal.SIGTERM, (1,), id="one"),
        pytest.param(signal.SIGUSR1, (0, 1), id="all", marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_both_and_the_run_goes_on_as_if_nothing_had_happened(
    tiny: MakeConfig, tmp_path: Path, unbroken: Outcome, number: int, to: tuple[int, ...]
) -> None:
    """Priors, periods and metrics are those of the unbroken run."""
    config = tiny({"train.steps": 40, "checkpoint.every": 7})
    ranks = CommandRanks(config, tmp_path)
    ranks.wait_for_checkpoint(7)
    ranks.send(number, *to)
    assert ranks.wait() == [PREEMPTED, PREEMPTED], ranks.output()
    step = newest_step(config)
    assert 7 < step < 40
    assert f"checkpoint of step {step} is saved" in ranks.errors()[-1]
    assert len(ranks.errors()) == 1
    again = CommandRanks(config, tmp_path / "again")
    assert again.wait() == [0, 0], again.output()
    assert f"at step {step}" in again.output()
    unbroken.assert_equal(outcome(config))


def test_one_rank_alone(tiny: MakeConfig, tmp_path: Path) -> None:
    config = tiny({"train.steps": 5000})
    ranks = CommandRanks(config, tmp_path, world_size=1)
    ranks.wait_for_checkpoint(4)
    ranks.send(signal.SIGUSR1)
    assert ranks.wait() == [PREEMPTED], ranks.output()
    assert ranks.errors() == [
        f"preempted (SIGUSR1): checkpoint of step {newest_step(config)} is saved; "
        "start again to go on"
    ]


def test_a_forked_child_keeps_its_signals_to_itself() -> None:
    """Such as a worker of a pool that is told to end."""
    requests = StopRequests()
    requests.install()
    try:
        ready, tell = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(tell, b"1")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        assert not requests.asked()
        os.kill(os.getpid(), signal.SIGTERM)
        assert requests.asked() and requests.reason == "SIGTERM"
    finally:
        requests.remove()


@pytest.mark.parametrize("victim", ["command", pytest.param("rank", marks=pytest.mark.slow)])
def test_through_the_deepspeed_launcher(tiny: MakeConfig, tmp_path: Path, victim: str) -> None:
    """SIGTERM to the command reaches nobody: the ranks notice its death and save, or, sent to a
    rank, its exit code comes out of the command."""
    config = tiny({"train.steps": 5000, "checkpoint.every": 5})
    (tmp_path / "config.yaml").write_text(dump_config(config))
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--num_gpus=2"]
    launcher = subprocess.Popen(
        [*deepspeed, f"--master_port={free_port()}", TRAIN, f"--config={tmp_path}/config.yaml"],
        env=clean_environment(),
        stdout=(tmp_path / "out").open("w"),
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        ranks = _wait_for_ranks(launcher.pid, config, tmp_path / "out")
        os.kill(launcher.pid if victim == "command" else ranks[1], signal.SIGTERM)
        code = launcher.wait(PATIENCE)
        assert code == (-signal.SIGTERM if victim == "command" else PREEMPTED)
        deadline = time.monotonic() + PATIENCE
        while any(psutil.pid_exists(pid) for pid in ranks):
            assert time.monotonic() < deadline, "a rank trains on without its launcher"
            time.sleep(0.05)
    finally:
        for pid in processes_of({launcher.pid}):
            os.kill(pid, signal.SIGKILL)
    text = (tmp_path / "out").read_text()
    assert f"checkpoint of step {newest_step(config)} is saved" in text
    assert ("the launcher is gone" in text) is (victim == "command")


def _wait_for_ranks(launcher: int, config: Config, log: Path) -> list[int]:
    deadline = time.monotonic() + PATIENCE
    while newest_step(config) < 5:
        assert time.monotonic() < deadline and psutil.pid_exists(launcher), log.read_text()
        time.sleep(0.05)
    lines = {
        p: Path(f"/proc/{p}/cmdline").read_text().split("\0") for p in processes_of({launcher})
    }
    ranks = [pid for pid, line in lines.items() if any("--local_rank=" in a for a in line)]
    assert len(ranks) == 2, lines
    return ranks


@pytest.mark.parametrize(
    ("line", "launcher"),
    [
        ("python /venv/bin/deepspeed --num_gpus 2 launch/train.py", True),
        ("python -u -m deepspeed.launcher.launch --world_info=x train.py", True),
        ("python /venv/bin/torchrun --nproc-per-node 2 launch/train.py", True),
        ("python -m torch.distributed.run launch/train.py", True),
        ("bash -c deepspeed", False),
        ("python launch/train.py --config deepspeed", False),
        ("python -m pytest", False),
        ("sshd", False),
    ],
)
def test_what_counts_as_a_launcher(line: str, launcher: bool) -> None:
    """A shell that goes away, as after nohup, is not one."""
    assert is_launcher(line.split()) is launcher
