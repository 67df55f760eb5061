"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from simpro_fast.errors import UserError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write to a temporary file beside `path`; on success it takes the place of `path`.

    Raises:
        UserError: the disk is full, or the folder cannot be written. `path` is as it was.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException as error:
        if temporary is not None:
            os.unlink(temporary)
        ours = (None, temporary, str(path.parent), str(path))
        # Only of our own writes; an error about another file is not this one's to explain.
        if isinstance(error, OSError) and error.errno and error.filename in ours:
            raise UserError(f"{path}: cannot be written ({_cure(error)})") from None
        raise


def _cure(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{reason}; free some space or choose another folder"
    return f"{reason}; check the folder and its permissions"
