"""One process at a time: locks on files and folders that the death of their holder frees."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simpro_fast.utils.atomic_write import unwritable

logger = logging.getLogger(__name__)


@contextmanager
def locked(
    path: Path, cure: str, *, folder: bool = False, wait: bool = True, remove: bool = False
) -> Iterator[None]:
    """Hold `path`, which is made if it is missing, against other processes that ask for it.

    Where a file system has no locks, a warning says so and nothing is held. NFS locks only what is
    open for writing, so files and no folders: there a folder is not held, without a word.

    Args:
        path: a file that serves for this alone, or with `folder` a folder.
        cure: what to do when it cannot be made.
        remove: delete the file at the end; then all that ask for it must say so.

    Raises:
        OutputError: it cannot be made.
        BlockingIOError: another process holds it, without `wait`.
    """
    held = _hold(path, cure, folder, wait)
    while remove and not _is_at(held, path):  # its last holder removed it before we had it
        os.close(held)
        held = _hold(path, cure, folder, wait)
    try:
        yield
    finally:
        if remove:
            with suppress(OSError):
                os.unlink(path)
        os.close(held)


def _hold(path: Path, cure: str, folder: bool, wait: bool) -> int:
    """A descriptor of the path, locked."""
    try:
        (path if folder else path.parent).mkdir(parents=True, exist_ok=True)
        held = os.open(path, os.O_RDONLY if folder else os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise unwritable(path.parent, error, cure) from None
    try:
        fcntl.flock(held, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        os.close(held)
        raise
    except OSError as error:
        if not folder:
            reason = f"this file system has no locks ({error.strerror})"
            logger.warning("%s: %s; never run the same command twice at once", path, reason)
    return held


def _is_at(held: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(held), os.stat(path))
    except OSError:
        return False
