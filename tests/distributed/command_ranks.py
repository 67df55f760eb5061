"""Ranks of the training command for tests: started directly, watched, killed, with a time-out.

They are forked from a server that has imported everything once, so a start takes a fraction of a
second; each gets its own session, so that whatever it leaves behind can be found.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from simpro_fast.config import Config, dump_config
from simpro_fast.run.checkpoint import list_checkpoints, step_of

TIMEOUT = 90.0
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.distributed.command_ranks", "tests.distributed.preload"])


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
        port = free_port()
        self.processes = [
            _context.Process(
                target=_rank_main, args=(rank, world_size, port, str(file), str(self._log), change)
            )
            for rank in range(world_size)
        ]
        for process in self.processes:
            process.start()

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


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _rank_main(
    rank: int,
    world_size: int,
    port: int,
    file: str,
    log: str,
    change: Callable[[int], None] | None,
) -> None:
    os.setsid()
    for number, name in ((1, "out"), (2, "err")):
        target = os.open(f"{log}/rank{rank}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(target, number)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    environment: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world_size,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DS_ACCELERATOR": "cpu",
    }
    os.environ.update({k: str(v) for k, v in environment.items()})
    torch.set_num_threads(1)
    from simpro_fast.cli.train import main

    if change is not None:
        change(rank)
    code = main(["--config", file])
    sys.stdout.flush()
    sys.exit(code)
