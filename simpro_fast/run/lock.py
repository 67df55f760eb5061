"""One start at a time in a run directory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from simpro_fast.distributed.process_group import Ranks
from simpro_fast.utils.atomic_write import unwritable
from simpro_fast.utils.errors import PeerError, UserError
from simpro_fast.utils.file_lock import locked
from simpro_fast.utils.machine import host_name

_CURE = "check output_dir and its permissions"


def lock_path(run_dir: Path) -> Path:
    """Beside the run directory, which a user may move away."""
    return run_dir.with_name(f".{run_dir.name}.lock")


class RunLock:
    """Holds a run directory for one launch, on rank 0.

    Two locks of the operating system, both freed by the death of the process: on the file
    `lock_path`, which holds the name of the holder, and on the run directory itself, so that the
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
        self._on_main(self._take)

    def probe(self) -> None:
        """Refuse a folder that cannot be written, as `take` does, and leave nothing behind.

        Raises:
            UserError: on rank 0, the folder cannot be written.
            PeerError: on the other ranks then.
        """
        self._on_main(self._probe)

    def _on_main(self, act: Callable[[], None]) -> None:
        refusal: UserError | None = None
        if self._ranks.is_main:
            try:
                act()
            except UserError as error:
                refusal = error
        said = "" if refusal is None else f"{refusal.exit_code} {refusal}"
        told = self._ranks.gather_bytes(said.encode())[0].decode()
        if refusal is not None:
            raise refusal
        if told:
            code, _, why = told.partition(" ")
            raise PeerError(why, int(code))

    def release(self) -> None:
        """Harmless without a lock. A run directory that stayed empty goes."""
        self._held.close()

    def _probe(self) -> None:
        """In the folder that the missing ones would be made in, by a file without a name."""
        places = (self._run_dir, *self._run_dir.parents)
        folder = next((place for place in places if os.path.lexists(place)), Path())
        try:
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise unwritable(folder, error, _CURE) from None

    def _take(self) -> None:
        path, cure = lock_path(self._run_dir), _CURE
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
