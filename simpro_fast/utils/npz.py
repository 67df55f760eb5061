"""Reading npz files: nothing in them is unpickled."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Container

import numpy as np


def read_npz(
    path: str | os.PathLike[str], names: Container[str] | None = None
) -> dict[str, np.ndarray]:
    """The arrays of an npz file, or those of them that are named.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no npz file of plain arrays; says why on one line.
    """
    try:
        with zipfile.ZipFile(path):  # np.load would take a single array as well
            archive = np.load(path, allow_pickle=False)
        with archive:
            return {name: archive[name] for name in archive.files if names is None or name in names}
    except OSError:
        raise
    except Exception as error:  # numpy and zipfile raise nearly anything on a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(reason) from None
