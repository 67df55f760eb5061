"""Trials against a run: its configuration, checkpoints, disk, signals, processes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from simpro_fast.config import Config, parse_config
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.run.checkpoint import list_checkpoints, newest_whole
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.logs import log_to_terminal
from tests.conftest import TINY, TRAIN
from tests.distributed.chaos import chaos_config, kill_repeatedly
from tests.distributed.command_ranks import CommandRanks
from tests.distributed.failures import test_failing_rank as hanging
from tests.distributed.outcomes import outcome
from tests.equality import assert_bit_equal
from tests.processes import PATIENCE, clean_environment
from tests.run.test_disk_trouble import Disk, mount, train
from tests.survival.attack import Attempt, refused, trial
from tests.training.test_resume import WRONG, spoil


def _config(folder: Path, **changes: Any) -> Config:
    tree = {**TINY, "output_dir": str(folder / "runs")}
    for key, value in changes.items():
        tree[key] = {**TINY.get(key, {}), **value}
    return parse_config(tree)


def _complaint(check: Callable[[], object]) -> str | None:
    """What a check that should pass says otherwise."""
    try:
        check()
    except BaseException as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return None


def _train(config: Config, steps: int) -> int:
    """Train up to a step and save every second one; returns the step it went on from."""
    log_to_terminal(False)
    trainer = Trainer(config, start_ranks(config))
    try:
        begun = trainer.step
        while trainer.step < steps:
            trainer.train_step()
            if trainer.step % 2 == 0:
                trainer.save()
        return begun
    finally:
        trainer.close()
        stop_ranks()


@trial("damaged checkpoints", slow=True)
def damaged_checkpoints(folder: Path) -> Iterator[Attempt]:
    config = _config(folder)
    _train(config, 4)
    newest, before = list_checkpoints(config.run_dir / "checkpoints")
    whole, noise = newest.read_bytes(), random.Random(0)
    states = {newest: newest_whole(before.parent), before: newest_whole(before.parent, below=4)}
    for number in range(200):
        content = bytearray(whole)
        kind = ("a flipped bit", "cut", "a block of zeros")[number % 3]
        place = noise.randrange(len(content))
        if kind == "cut":
            content = content[:place]
        elif kind == "a flipped bit":
            content[place] ^= 1 << noise.randrange(8)
        else:
            content[place : place + 4096] = bytes(len(content[place : place + 4096]))
        newest.write_bytes(content)

        def same() -> None:
            found = newest_whole(newest.parent)
            assert found is not None
            wanted = states[found[0]]
            assert wanted is not None
            assert_bit_equal(found[1], wanted[1], "state")

        yield Attempt(f"{kind} at {place}", _complaint(same))


@trial("checkpoints that can be read but are wrong")
def wrong_checkpoints(folder: Path) -> Iterator[Attempt]:
    made = _config(folder / "made")
    _train(made, 4)
    for number, (what, change) in enumerate(WRONG.items()):
        config = _config(folder / str(number))
        shutil.copytree(made.run_dir, config.run_dir)
        spoil(config, change)

        def goes_on(config: Config = config) -> None:
            begun = _train(config, 2)
            assert begun == 2, f"it went on from step {begun}"

        yield Attempt(what, _complaint(goes_on))


@trial("a disk that is full or read-only", slow=True)
def disk_trouble(folder: Path) -> Iterator[Attempt]:
    """From a step on: the run ends with words, and the next start goes on to its end."""
    path = folder / "disk"
    path.mkdir()
    if not mount("-t", "tmpfs", "-o", "size=16m", "none", path):
        return  # needs root
    try:
        for name, trouble in (("full", Disk.fill), ("read-only", Disk.protect)):
            for step in range(0, 12, 2):
                disk = Disk(path)
                config = _config(path, checkpoint={"on_error": "continue", "every": 2})
                complaint = refused(lambda: train(config, {step: lambda: trouble(disk)}))  # noqa: B023
                disk.restore()
                complaint = complaint or _complaint(lambda: train(config, {}))  # noqa: B023
                finished = (config.run_dir / "summary.json").exists()
                complaint = complaint or (None if finished else "not finished")
                yield Attempt(f"{name} from step {step} on", complaint)
                shutil.rmtree(config.output_dir)
    finally:
        subprocess.run(["umount", str(path)], check=True)


@trial("signals during start", slow=True)
def signals_during_start(folder: Path) -> Iterator[Attempt]:
    noise = random.Random(0)
    wanted = {signal.SIGTERM: 75, signal.SIGUSR1: 75, signal.SIGINT: 130}
    for number in range(12):
        sent, delay = list(wanted)[number % 3], noise.uniform(0.2, 6)
        process = subprocess.Popen(
            [sys.executable, TRAIN, "--config", "digits_lt/reversed", f"output_dir={folder}"],
            env=clean_environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        time.sleep(delay)
        process.send_signal(sent)
        try:
            _, said = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            said = "hangs"
        very_early = process.returncode == -sent and not said  # before Python has begun
        right = very_early or (process.returncode == wanted[sent] and said.count("\n") == 1)
        what = f"{signal.Signals(sent).name} after {delay:.1f} s"
        yield Attempt(what, None if right else f"exit code {process.returncode}: {said[-300:]}")


@trial("kills", slow=True)
def kills(folder: Path) -> Iterator[Attempt]:
    """Two ranks, SIGKILL at seeded moments, every second one into a save; then bit-equality."""
    unbroken = chaos_config(folder, "unbroken", 44, 44)
    assert CommandRanks(unbroken, folder / "unbroken").wait() == [0, 0]
    config = chaos_config(folder, "killed", 44, 1)
    complaint = _complaint(lambda: kill_repeatedly(config, folder / "starts", 10, seed=7))
    complaint = complaint or _complaint(lambda: outcome(unbroken).assert_equal(outcome(config)))
    for number in range(1, 11):  # one run; what is wrong at its end is wrong after each
        yield Attempt(f"kill {number} of ten", complaint)


@trial("ranks that hang or die", slow=True)
def ranks_that_hang(folder: Path) -> Iterator[Attempt]:
    for change, victim in (
        *((hanging._sleeps, 1), (hanging._stops, 1), (hanging._stops_first, 0)),
        *((hanging._killed, 1), (hanging._defect, 1), (hanging._bad_image, 1)),
    ):
        config = _config(folder / change.__name__, distributed={"stall_timeout": 3})
        ranks = CommandRanks(config, folder / change.__name__, change=change)
        ranks.processes[1 - victim].join(PATIENCE)
        said = ranks.output(1 - victim, "err")
        if ranks.processes[victim].is_alive():
            os.kill(ranks.processes[victim].pid or 0, signal.SIGCONT)
        ranks.wait(60)
        right = said.count("\n") == 1 and f"rank {victim} on " in said
        yield Attempt(change.__name__, None if right else f"the other rank said: {said!r}")
