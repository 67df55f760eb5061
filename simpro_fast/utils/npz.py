"""Reading npz files whose headers may lie: nothing is allocated that the file does not hold."""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from collections.abc import Sequence

import numpy as np

from simpro_fast.utils.regular_file import open_regular

BROKEN = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, RuntimeError)
"""Exceptions of `read_npz` on a damaged file; RuntimeError where it is encrypted."""
_CHUNK = 1 << 20


def read_npz(
    path: str | os.PathLike[str],
    names: Sequence[str] | None = None,
    most_bytes: int | None = None,
) -> dict[str, np.ndarray]:
    """The arrays of an npz file; nothing in it is unpickled.

    Args:
        names: only these, as far as they are there.
        most_bytes: of the arrays, unpacked: a small file may swell to a thousand times its size.
            None: no more than the file has, which is enough for what `np.savez` writes.

    Raises:
        BROKEN: it cannot be read, is no npz file of plain arrays, or is larger than allowed.
    """
    arrays = {}
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        found = {member.filename.removesuffix(".npy"): member for member in archive.infolist()}
        wanted = [name for name in found if names is None or name in names]
        total = sum(found[name].file_size for name in wanted)
        most = os.fstat(file.fileno()).st_size if most_bytes is None else most_bytes
        if total > most:
            raise ValueError(f"unpacks to {total} bytes, more than the {most} it may have")
        for name in wanted:
            with archive.open(found[name]) as content:
                version = np.lib.format.read_magic(content)
                if version == (1, 0):
                    shape, fortran, dtype = np.lib.format.read_array_header_1_0(content)
                else:
                    shape, fortran, dtype = np.lib.format.read_array_header_2_0(content)
                size = math.prod(shape) * dtype.itemsize
                if dtype.hasobject or content.tell() + size != found[name].file_size:
                    raise ValueError(f"{name} does not hold what its header says")
                raw = np.empty(size, np.uint8)
                for start in range(0, size, _CHUNK):
                    part = content.read(min(_CHUNK, size - start))
                    raw[start : start + len(part)] = np.frombuffer(part, np.uint8)
            arrays[name] = raw.view(dtype).reshape(shape, order="F" if fortran else "C")
    return arrays
