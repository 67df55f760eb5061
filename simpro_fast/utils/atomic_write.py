"""Small files, written whole and read with one-line errors."""

from __future__ import annotations

import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from simpro_fast.errors import UserError
from simpro_fast.utils.regular_file import read_text


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write to a temporary file beside `path`; on success it takes the place of `path`.

    Args:
        durable: also survives a power cut, at the price of waiting for the disk.

    Raises:
        UserError: the disk is full, or the folder cannot be written. `path` is as it was.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
        temporary = None
        if durable:
            _sync_folder(path.parent)
    except BaseException as error:
        if temporary is not None:
            os.unlink(temporary)
        ours = (None, temporary, str(path), *map(str, path.parents))
        # Only of our own writes; an error about another file is not this one's to explain.
        if isinstance(error, OSError) and error.errno and error.filename in ours:
            raise UserError(f"{path}: cannot be written ({_cure(error)})") from None
        raise


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cure(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return f"{reason}; free some space or choose another folder"
    return f"{reason}; check the folder and its permissions"


def write_atomically(path: Path, text: str, *, durable: bool = True) -> None:
    """Replace `path` by `text` in UTF-8, or leave it as it was. Raises as `replacing` does."""
    with replacing(path, durable=durable) as file:
        file.write(text.encode("utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Strict JSON: a number that is not finite becomes null."""
    write_atomically(path, json.dumps(finite(value), indent=1, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: it cannot be read or holds something else.
    """
    try:
        value = json.loads(read_text(path))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is damaged ({error})") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} is damaged (a JSON object is missing)")
    return value


def finite(value: Any) -> Any:
    """The same structure with null for every number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
