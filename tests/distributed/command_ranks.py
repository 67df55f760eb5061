"""Ranks of the training command for tests: started directly, watched, killed, with a time-out.

Each has its own session, so that whatever it leaves behind can be found.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from simpro_fast.config import Config, dump_config
from simpro_fast.run.checkpoint import list_checkpoints, step_of
from tests.processes import clean_environment, free_port, start

TIMEOUT = 90.0


class CommandRanks:
    """`train.py` with a configuration on `world_size` ranks of this machine.

    Args:
        change: module-level function that each rank calls with its number before it starts, to
            make it fail or hang.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        world_size: int = 2,
        change: Callable[[int], None] | None = None,
    ) -> None:
        self.config = config
        self._log = folder / "log"
        self._log.mkdir(parents=True, exist_ok=True)
        file = folder / "config.yaml"
        file.write_text(dump_config(config))
        launched = {
            **clean_environment(),
            "WORLD_SIZE": str(world_size),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        self.processes = [
            start(
                _rank_main,
                rank,
                str(file),
                change,
                output=self._log / f"rank{rank}",
                environment={**launched, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(world_size)
        ]

    def wait(self, timeout: float = TIMEOUT) -> list[int]:
        """Exit codes by rank. A rank that is still there after `timeout` fails the test."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        running = [p.pid for p in self.processes if p.is_alive()]
        if running:
            self.kill()
        assert not running, f"still running after {timeout} s:\n{self.output()}"
        return [p.exitcode for p in self.processes]

    def send(self, number: int, *ranks: int) -> None:
        """A signal to these ranks, to all without any."""
        for rank in ranks or range(len(self.processes)):
            os.kill(self.processes[rank].pid, number)

    def kill(self) -> None:
        """SIGKILL to all ranks, at once as far as that can be."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait_for_checkpoint(self, step: int, timeout: float = TIMEOUT) -> None:
        """Until a checkpoint of `step` or later is there."""
        deadline = time.monotonic() + timeout
        while newest_step(self.config) < step:
            assert all(p.exitcode in (None, 0) for p in self.processes), self.output()
            assert time.monotonic() < deadline, f"no checkpoint of step {step}:\n{self.output()}"
            time.sleep(0.005)

    def wait_for_save(self, timeout: float = TIMEOUT) -> None:
        """Until a checkpoint is being written, or has just been."""
        deadline, before = time.monotonic() + timeout, newest_step(self.config)
        while not half_written(self.config) and newest_step(self.config) <= before + 1:
            assert time.monotonic() < deadline, f"nothing is saved:\n{self.output()}"

    def output(self, rank: int | None = None, stream: str = "*") -> str:
        """What the ranks have printed, `stream` out or err."""
        pattern = f"rank{'*' if rank is None else rank}.{stream}"
        return "".join(p.read_text() for p in sorted(self._log.glob(pattern)))

    def errors(self) -> list[str]:
        """Lines on stderr, of all ranks."""
        return self.output(stream="err").splitlines()

    def left_behind(self) -> list[int]:
        """Processes that a rank has started and that outlive it."""
        return processes_of({p.pid for p in self.processes})


def processes_of(sessions: set[int]) -> list[int]:
    """Running processes that belong to one of these sessions (Linux)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) in sessions and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def newest_step(config: Config) -> int:
    """Step of the newest checkpoint, 0 without one."""
    found = list_checkpoints(config.run_dir / "checkpoints")
    return step_of(found[0]) if found else 0


def half_written(config: Config) -> list[Path]:
    """Checkpoints that have no name yet."""
    return list((config.run_dir / "checkpoints").glob(".step_*"))


def _rank_main(rank: int, file: str, change: Callable[[int], None] | None) -> None:
    from simpro_fast.cli.train import main

    if change is not None:
        change(rank)
    sys.exit(main(["--config", file]))
