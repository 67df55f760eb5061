"""One start at a time in a run directory."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
from pathlib import Path
from typing import TextIO

from simpro_fast.distributed.process_group import Ranks
from simpro_fast.errors import PeerError, UserError

logger = logging.getLogger(__name__)


def lock_path(run_dir: Path) -> Path:
    """Beside the run directory, which a smoke run empties and a user may move away."""
    return run_dir.with_name(f".{run_dir.name}.lock")


class RunLock:
    """Holds a run directory for one launch, on rank 0.

    The lock is the operating system's: the death of the process frees it, whatever kills it.
    """

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._file: TextIO | None = None

    def take(self) -> None:
        """All ranks call it together, before anything in the run directory is read or changed.

        Raises:
            UserError: on rank 0, another start holds it (named by host and process), or the folder
                cannot be written.
            PeerError: on the other ranks then.
        """
        refusal: UserError | None = None
        if self._ranks.is_main:
            try:
                self._file = _locked(self._run_dir)
            except UserError as error:
                refusal = error
        told = self._ranks.gather_bytes(str(refusal or "").encode())[0]
        if refusal is not None:
            raise refusal
        if told:
            raise PeerError(told.decode())

    def release(self) -> None:
        """Harmless without a lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(run_dir: Path) -> TextIO:
    path = lock_path(run_dir)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}); check output_dir and its permissions"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "another process"
        lock.close()
        raise UserError(
            f"{run_dir} is in use: {holder} trains there; wait for it or stop it, "
            "or choose another name, seed or output_dir"
        ) from None
    except OSError as error:
        logger.warning(
            "%s: this file system has no locks (%s); never start this run twice at once",
            path,
            error.strerror,
        )
        return lock
    lock.truncate(0)
    lock.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    lock.flush()
    return lock
