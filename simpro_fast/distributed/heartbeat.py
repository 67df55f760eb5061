"""Signs of life: one small file per rank, by which a rank that hangs is found."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field

from simpro_fast.distributed.launchers import is_running
from simpro_fast.utils.atomic_write import write_atomically
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import Count, FileSchema, read_as
from simpro_fast.utils.machine import host_name


class Beat(FileSchema):
    """Where one rank is."""

    rank: Count
    host: str
    pid: Annotated[int, Field(gt=0, lt=2**31)]
    number: Count
    """Counts the beats: one that stands still belongs to a process that does."""
    step: Count
    """Steps completed."""
    phase: str
    collectives: Count
    """Collectives entered: the rank that all others wait for has entered fewest."""
    where: str
    """Innermost Python line of the training thread; empty while it makes progress."""


class Heartbeats:
    """The beats of all ranks, files in `folder`. Not synced to disk: they are for the living."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        self._folder, self._rank, self._world_size = folder, rank, world_size
        self._host = host_name()
        self._number = 0

    def beat(self, step: int, phase: str, where: str = "") -> None:
        """Write this rank's beat. A full disk must not end a run that would survive it."""
        self._number += 1
        beat = Beat(
            rank=self._rank,
            host=self._host,
            pid=os.getpid(),
            number=self._number,
            step=step,
            phase=phase,
            collectives=collectives_entered(),
            where=where,
        )
        with suppress(UserError, OSError):
            write_atomically(self._path(self._rank), beat.model_dump_json(), durable=False)

    def read(self) -> dict[int, Beat]:
        """The last beats by rank, without those that cannot be read."""
        beats = (beat for beat, _ in read_beats(self._folder))
        return {beat.rank: beat for beat in beats if beat.rank < self._world_size}

    def gone(self) -> list[Beat]:
        """The last beats of ranks of this machine whose process has ended."""
        beats = self.read().values()
        return [b for b in beats if b.host == self._host and not is_running(b.pid)]

    def remove(self) -> None:
        """Take this rank's file away; the last rank takes the folder."""
        try:
            self._path(self._rank).unlink(missing_ok=True)
            self._folder.rmdir()
        except OSError:
            return  # other ranks are still in it

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.json"


def read_beats(folder: Path) -> Iterator[tuple[Beat, float]]:
    """The beats that there are, without those that cannot be read, and when each was written.

    Seconds since 1970 by the file system's clock.
    """
    names: list[str] = []
    with suppress(OSError):  # there is none, or no longer
        names = os.listdir(folder)
    for name in sorted(names):
        with suppress(UserError, OSError):  # taken away just now, or no beat
            beat, written = read_as(folder / name, Beat), (folder / name).stat().st_mtime
            if name == f"rank{beat.rank}.json":
                yield beat, written


def stalled_ranks(earlier: dict[int, Beat], later: dict[int, Beat], world_size: int) -> list[int]:
    """The ranks that the others wait for, from two looks at all beats some beats apart.

    A process that has stopped beating; else those that have entered fewest collectives; none
    where all are in the same one, which is then the network's or the device's fault.
    """
    silent = [
        rank
        for rank in range(world_size)
        if rank not in later or (rank in earlier and earlier[rank].number == later[rank].number)
    ]
    if silent:
        return silent
    entered = {rank: beat.collectives for rank, beat in later.items()}
    fewest = min(entered.values())
    behind = [rank for rank, count in entered.items() if count == fewest]
    return behind if len(behind) < world_size else []


def collectives_entered() -> int:
    """Collectives of this process so far, over all its process groups."""
    if not dist.is_initialized():
        return 0
    try:
        groups: list[Any] = list(dist.distributed_c10d._world.pg_map)
        return sum(group._get_sequence_number_for_group() for group in groups)
    except RuntimeError:
        return 0  # a group is just being taken down


def line_of_thread(thread: threading.Thread) -> str:
    """File, line and function that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return "nowhere"
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
