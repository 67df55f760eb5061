"""Files of this machine and of what is mounted on it: patience with a network file system."""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PAUSES = (0.2, 2.0)
"""Seconds before the second and the third try."""
_TRANSIENT = {errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_REMOTE = re.compile(r"([a-z][a-z0-9+.-]*:/|pipe:)", re.IGNORECASE)


class Repeated:
    """How often a read has been repeated in this process."""

    count = 0
    _lock = threading.Lock()

    def add(self) -> None:
        with self._lock:
            self.count += 1


repeated = Repeated()


def is_transient(error: BaseException) -> bool:
    """Whether a network file system may give the same file a moment later."""
    return isinstance(error, OSError) and error.errno in _TRANSIENT


def patiently(read: Callable[[], T]) -> T:
    """What `read` returns; after a transient error it is called again, three times in all.

    Raises:
        OSError: the last try's.
    """
    for pause in PAUSES:
        try:
            return read()
        except OSError as error:
            if not is_transient(error):
                raise
        repeated.add()
        time.sleep(pause)
    return read()


def remote(path: str) -> str | None:
    """What to do about a path that is none of this machine, such as s3://bucket; None where it is.

    Also as `pathlib` writes it, with one slash; the message has both.
    """
    if _REMOTE.match(path) is None or os.path.lexists(path):
        return None
    path = re.sub(r"^([^:/]+):/+", r"\1://", path)
    return f"{path}: only files of this machine are read; mount or copy it, and give that folder"
