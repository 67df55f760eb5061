"""Opening files that somebody else named: a pipe or a device would be waited for without end."""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path

MISSING, FOLDER = "does not exist", "is a folder, not a regular file"
_SPECIAL = "is a pipe, socket or device, not a regular file"


def check_regular(path: str | os.PathLike[str]) -> os.stat_result:
    """Return `os.stat` of a regular file; links are followed.

    Raises:
        OSError: it is missing, cannot be reached, or is a folder, pipe, socket or device.
    """
    found = os.stat(path)
    if not stat.S_ISREG(found.st_mode):
        reason = FOLDER if stat.S_ISDIR(found.st_mode) else _SPECIAL
        raise OSError(errno.EINVAL, reason, os.fspath(path))
    return found


def no_file(path: str | os.PathLike[str]) -> str | None:
    """Why there is no file to read at a path, as the end of a sentence; None where there is."""
    try:
        check_regular(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: a NUL in the name
        return MISSING
    except OSError as error:
        if error.errno == errno.ELOOP:
            return "is a circle of links"
        special = error.errno == errno.EINVAL  # of check_regular
        return error.strerror if special else f"cannot be read ({error.strerror})"
    return None


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """`open(path, "rb")` of a regular file. Raises as `check_regular` does."""
    check_regular(path)
    return open(path, "rb")


def read_regular(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file. Raises as `open_regular` does."""
    with open_regular(path) as file:
        return file.read()


def read_text(path: Path) -> str:
    """The text of a regular file in UTF-8. Raises as `open_regular`, and `UnicodeDecodeError`."""
    return read_regular(path).decode("utf-8")
