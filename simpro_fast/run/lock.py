"""One start at a time in a run directory."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path

from simpro_fast.distributed.process_group import Ranks
from simpro_fast.errors import PeerError, UserError
from simpro_fast.utils.file_lock import locked, run_lock
from simpro_fast.utils.machine import host_name


class RunLock:
    """Holds a run directory for one launch, on rank 0.

    Two locks of the operating system, both freed by the death of the process: on the file
    `run_lock`, which holds the name of the holder, and on the run directory itself, so that the
    file may be deleted.
    """

    def __init__(self, run_dir: Path, ranks: Ranks) -> None:
        self._run_dir, self._ranks = run_dir, ranks
        self._held = ExitStack()

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
                self._take()
            except UserError as error:
                refusal = error
        told = self._ranks.gather_bytes(str(refusal or "").encode())[0]
        if refusal is not None:
            raise refusal
        if told:
            raise PeerError(told.decode())

    def release(self) -> None:
        """Harmless without a lock. A run directory that stayed empty goes."""
        self._held.close()

    def _take(self) -> None:
        path, cure = run_lock(self._run_dir), "check output_dir and its permissions"
        with ExitStack() as stack:
            try:
                stack.enter_context(locked(path, cure, wait=False))
                stack.enter_context(locked(self._run_dir, cure, folder=True, wait=False))
            except BlockingIOError:
                holder = path.read_text(encoding="utf-8", errors="replace").strip()
                raise UserError(
                    f"{self._run_dir} is in use: {holder or 'another process'} trains there; wait "
                    "for it or stop it, or choose another name, seed or output_dir"
                ) from None
            with suppress(OSError):  # a full disk is the run's to report
                path.write_text(f"process {os.getpid()} on {host_name()}\n", encoding="utf-8")
            stack.callback(_remove_if_empty, self._run_dir)
            self._held = stack.pop_all()


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
