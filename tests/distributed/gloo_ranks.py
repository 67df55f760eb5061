"""Runs functions on several gloo ranks for tests, with a hang time-out.

Tests share them: `shared_ranks(2)` are two processes that wait for work until the test session
ends.
"""

import atexit
import functools
import io
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from tests.processes import PATIENCE, start


class GlooRanks:
    """`world_size` processes in one process group, which run module-level functions together."""

    def __init__(self, world_size: int, timeout: float = PATIENCE) -> None:
        self.world_size, self.timeout = world_size, timeout
        self._folder = TemporaryDirectory()
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(world_size):
            ours, theirs = Pipe()
            arguments = (rank, world_size, Path(self._folder.name), timeout, theirs)
            process = start(_serve, *arguments, daemon=True)
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Results of `function(rank, world_size, *args)` by rank.

        Results go through torch.save. After a failure or a time-out, which are AssertionErrors
        with the rank's traceback, the ranks are gone.
        """
        try:
            for pipe in self._pipes:
                pipe.send((function, args))
            answers = self._answers()
        except BaseException:
            self.close()
            raise
        return [torch.load(io.BytesIO(answer), weights_only=False) for answer in answers]

    def _answers(self) -> list[bytes]:
        deadline = time.monotonic() + self.timeout
        answers: dict[int, bytes] = {}
        while len(answers) < self.world_size:
            for rank, pipe in enumerate(self._pipes):
                if rank not in answers and pipe.poll(0.02):
                    try:
                        error, answers[rank] = pipe.recv()
                    except EOFError:
                        raise AssertionError(f"rank {rank} died") from None
                    assert not error, f"rank {rank} failed:\n{error}"
            assert time.monotonic() < deadline, (
                f"only ranks {sorted(answers)} have answered after {self.timeout} s"
            )
        return [answers[rank] for rank in range(self.world_size)]

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


@functools.cache
def _pool() -> dict[int, GlooRanks]:
    pool: dict[int, GlooRanks] = {}
    atexit.register(lambda: [ranks.close() for ranks in pool.values()])
    return pool


def shared_ranks(world_size: int) -> GlooRanks:
    """Ranks that other tests use as well; started anew after a failure."""
    pool = _pool()
    if world_size not in pool or not pool[world_size].alive:
        pool[world_size] = GlooRanks(world_size)
    return pool[world_size]


def run_ranks(function: Callable[..., Any], *args: Any, world_size: int = 2) -> list[Any]:
    """Results of `function(rank, world_size, *args)` by rank, on shared ranks."""
    return shared_ranks(world_size).run(function, *args)


def _serve(rank: int, world_size: int, folder: Path, timeout: float, pipe: Connection) -> None:
    # The rendezvous is a file, so that no port has to be chosen.
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout),
    )
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        buffer, error = io.BytesIO(), ""
        try:
            torch.save(function(rank, world_size, *args), buffer)
        except BaseException:
            error = traceback.format_exc()
        pipe.send((error, buffer.getvalue()))
