"""Small files, written whole and read with one-line errors."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from simpro_fast.utils.errors import OutputError, UserError
from simpro_fast.utils.regular_file import read_text


class _Written(io.FileIO):
    """A file that remembers why a write failed; torch and others hide it behind their own words."""

    refusal: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            self.refusal = error
            raise


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Write to a temporary file `.<name>.<random>.tmp` beside `path`, which then replaces `path`.

    It has the permissions that the umask leaves. A killed writer leaves its temporary file.

    Args:
        durable: also survives a power cut, at the price of waiting for the disk.

    Raises:
        OutputError: the disk is full, or the folder cannot be written. `path` is as it was.
    """
    raw: _Written | None = None
    temporary = path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.urandom(4).hex()}.tmp")
        raw = _Written(temporary, "xb")
        with io.BufferedWriter(raw) as file:
            yield file
            file.flush()
            if durable:
                os.fsync(raw.fileno())
            os.replace(temporary, path)
        if durable:
            _sync_folder(path.parent)
    except BaseException as error:
        if raw is not None:
            with suppress(OSError):  # the folder may have become read-only
                temporary.unlink(missing_ok=True)
        refusal = raw.refusal if raw is not None else None
        ours = (None, temporary, path, *path.parents)
        # Only of our own writes; an error about another file is not this one's to explain.
        if isinstance(error, OSError) and error.errno:
            about = Path(error.filename) if isinstance(error.filename, str) else error.filename
            refusal = error if raw is None or about in ours else refusal
        if refusal is None or not isinstance(error, Exception):
            raise
        raise unwritable(path, refusal) from None


def _sync_folder(folder: Path) -> None:
    """Put a new name on disk; file systems that cannot do this keep the file all the same."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


FULL = (errno.ENOSPC, errno.EDQUOT)


def unwritable(path: object, error: OSError, cure: str = "") -> OutputError:
    """What every output that cannot be written is reported by: what, why, and the cure."""
    reason = error.strerror or str(error)
    if error.errno in FULL:
        reason = f"disk full: {reason}"
    if error.errno in (*FULL, errno.EFBIG):
        cure = cure or "free some space or choose another folder"
    return OutputError(
        f"{path}: cannot be written ({reason}); {cure or 'check the folder and its permissions'}"
    )


def check_output(path: Path, *, folder: bool = False) -> None:
    """Make the folder of an output, and find out before long work whether it can be written.

    Args:
        path: a file, or with `folder` a folder.

    Raises:
        OutputError: it cannot.
    """
    if os.path.lexists(path) and path.is_dir() != folder:
        raise OutputError(f"{path}: is {'no' if folder else 'a'} folder; give another name")
    place = path if folder else path.parent
    try:
        place.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=place) as file:
            file.write(b"0")
    except OSError as error:
        raise unwritable(place, error) from None


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
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
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
