"""Opening files that somebody else named: nothing that could wait for ever is opened."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return `os.stat` of a regular file; links are followed.

    Raises:
        OSError: it is missing, cannot be reached, or is a folder, pipe, socket or device.
    """
    found = os.stat(path)
    _refuse_special(found, path)
    return found


MISSING, FOLDER = "does not exist", "is a folder, not a regular file"


def no_file(path: str | os.PathLike[str]) -> str | None:
    """Why there is no file to read at a path, as the end of a sentence; None where there is."""
    try:
        check_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        return MISSING
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a circle of links"
        special = error.errno == errno.EINVAL  # see _refuse_special
        return error.strerror if special else f"cannot be read ({error.strerror})"
    except ValueError:  # a NUL in the name
        return MISSING
    return None


def open_unbuffered(path: str | os.PathLike[str]) -> io.FileIO:
    """`open(path, "rb", buffering=0)` of a regular file.

    Raises:
        OSError: what `check_regular` raises; never waits, as opening a pipe would.
    """
    check_regular(path)  # opening a device may already do something to it
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_special(os.fstat(handle), path)  # exchanged in between
    except BaseException:
        os.close(handle)
        raise
    return io.FileIO(handle, "rb")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """`open(path, "rb")` of a regular file. Raises as `open_unbuffered` does."""
    return io.BufferedReader(open_unbuffered(path))


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8. Raises as `open_regular`, and `UnicodeDecodeError`."""
    return read_regular(path).decode("utf-8")


def _refuse_special(found: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise OSError(errno.EINVAL, f"is {kind}, not a regular file", os.fspath(path))
