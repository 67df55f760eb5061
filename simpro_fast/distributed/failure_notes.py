"""Which rank failed first, and why: every rank tells the others through the run directory.

A rank that fails closes its connections, and all that its peers see is a traceback about a lost
socket. So it leaves a note first, and they turn the lost connection into one line about it.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
from pydantic import Strict

from simpro_fast.distributed.process_group import Ranks
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import FileSchema, read_as
from simpro_fast.utils.machine import host_name
from simpro_fast.utils.printable import show

NOTE_DELAY = 2.0
"""Seconds that a note may need to become visible over a network file system."""
_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"),
    *("/gloo/", "NCCL error", "ncclRemoteError", "ncclSystemError", "remote process exited"),
)


class Failure(FileSchema):
    """What ended a rank."""

    rank: int
    host: str
    step: int
    """Steps completed by then."""
    kind: str
    """`error`, `stalled`, `interrupted` or `preempted`."""
    message: str
    exit_code: int
    time: float
    """Seconds since 1970 on that rank's machine."""
    silent: Annotated[tuple[int, ...], Strict(False)] = ()
    """Ranks that hang, and so cannot tell this themselves."""
    launch: int = 0
    """Token of the start that it ended, in a rank's note."""

    @classmethod
    def of(cls, rank: int, step: int, kind: str, message: str, exit_code: int) -> Failure:
        """A failure here and now."""
        return cls(
            rank=rank,
            host=host_name(),
            step=step,
            kind=kind,
            message=message,
            exit_code=exit_code,
            time=time.time(),
        )

    def __str__(self) -> str:
        what = {"error": "failed first", "preempted": "was preempted"}.get(self.kind, self.kind)
        return f"rank {self.rank} on {self.host} {what} after step {self.step}: {self.message}"


class FailureNotes:
    """The notes of all ranks of this launch, files in `folder`.

    A token that the ranks share tells them from notes of an earlier launch. All ranks must
    construct it together.
    """

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self._folder = folder
        self._rank = ranks.rank
        token = int.from_bytes(os.urandom(6), "big") if ranks.is_main else 0
        shared = torch.tensor([token], dtype=torch.int64, device=ranks.device)
        self._token = int(ranks.sum(shared).item())

    def leave(self, failure: Failure) -> None:
        """Write this rank's note. A disk that refuses it is not what the user has to hear of."""
        note = failure.model_copy(update={"launch": self._token})
        with suppress(OSError, UserError):
            write_json(self._folder / f"rank{self._rank}.json", note.model_dump())

    def first(self, wait: float = 0.0) -> Failure | None:
        """The earliest note of another rank, None if there is none within `wait` seconds."""
        deadline = time.monotonic() + wait
        while True:
            found = self._read()
            if found or time.monotonic() >= deadline:
                return min(found, key=lambda failure: failure.time, default=None)
            time.sleep(0.05)

    def _read(self) -> list[Failure]:
        found = []
        for path in self._folder.glob("rank*.json"):
            with suppress(UserError):  # not a note of ours
                note = read_as(path, Failure)
                if note.launch == self._token and path.stem != f"rank{self._rank}":
                    found.append(note)
        return found


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank, or the network, is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


def is_mine_to_tell(failure: Failure, ranks: Ranks) -> bool:
    """One line per machine, besides the failing rank's own; what a user asked for, once."""
    if failure.kind in ("interrupted", "preempted"):
        return ranks.is_main
    first = ranks.rank - ranks.local_rank
    here = range(first, first + ranks.local_world_size)
    speaker = next((rank for rank in here if rank not in failure.silent), first)
    return ranks.rank in (failure.rank, speaker)


def line_about(failure: Failure, ranks: Ranks) -> str:
    """How this rank tells a failure, its own or another one's."""
    if failure.kind in ("interrupted", "preempted"):
        return failure.message
    where = f" [rank {ranks.rank}]" if ranks.world_size > 1 else ""
    if ranks.rank in failure.silent:  # it runs again, too late
        return f"error{where}: the other ranks have given this one up: {failure.message}"
    mine = failure.rank == ranks.rank
    return f"error{where}: {failure.message if mine else failure}"


def say(line: str) -> None:
    """A line on stderr. Where a launcher has died there may be nobody to read it."""
    with suppress(OSError):
        show(line, file=sys.stderr)
