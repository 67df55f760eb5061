"""A copy of a large data set on disk that every process maps instead of holding it.

Two files: `<name>.images` is uint8 [n, side, side, 3] without a header, `<name>.npz` its index
(labels, lengths of the parts, sha256 of the images). The ranks of a machine share the pages that
they read, and a start costs neither a decoding nor a hashing of the whole set.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import OutputError, UserError
from simpro_fast.utils.file_lock import locked
from simpro_fast.utils.npz import read_npz

logger = logging.getLogger(__name__)

Part = tuple[np.ndarray, np.ndarray]
"""uint8 [n, 3, side, side] planes and int64 [n] labels of one part."""
_CHUNK = 4096


@dataclass(frozen=True)
class MappedImages:
    """An opened copy."""

    images: np.ndarray
    """uint8 [n, side, side, 3], memory-mapped read-only."""
    labels: np.ndarray
    """int64 [n]."""
    lengths: tuple[int, ...]
    """Images of each part, in the order in which they were given."""
    sha256: str
    """Digest of the bytes of `images`, from when they were written."""


def mapped_images(path: Path, parts: Callable[[], Iterator[Part]]) -> MappedImages:
    """Open the copy `path`.images, or write it first; of several processes one writes.

    The index knows size, time and inode of the images. Where they are others than those written
    (a damaged, replaced or copied file), both files are made again.

    Args:
        path: without suffix; its name must change with the source files.
        parts: reads the source files; called only if there is no copy.

    Raises:
        UserError: what `parts` raises, or the files cannot be written.
    """
    found = _open(path)
    if found is not None:
        return found
    with locked(path.with_suffix(".lock"), "set data.cache_dir"):
        found = _open(path)
        if found is None:
            logger.info("copying the images into %s, once", path.with_suffix(".images"))
            try:
                _write(path, parts())
            except OutputError as error:
                raise OutputError(f"{error}; or set data.cache_dir") from None
            found = _open(path)
    if found is None:
        raise UserError(f"{path.with_suffix('.images')}: changed while it was being opened")
    return found


def _open(path: Path) -> MappedImages | None:
    try:
        index = read_npz(path.with_suffix(".npz"))
        side, lengths = int(index["side"]), tuple(index["lengths"].tolist())
        labels, sha256 = index["labels"], str(index["sha256"])
        identity = index["identity"].tolist()
        images = path.with_suffix(".images")
        if identity != _identity(images):
            return None
        shape = (len(labels), side, side, 3)
        return MappedImages(np.memmap(images, np.uint8, "r", shape=shape), labels, lengths, sha256)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(path: Path, parts: Iterator[Part]) -> None:
    digest, labels = hashlib.sha256(), []
    with replacing(path.with_suffix(".images")) as file:
        for planes, own in parts:
            for start in range(0, len(planes), _CHUNK):
                pixels = np.ascontiguousarray(planes[start : start + _CHUNK].transpose(0, 2, 3, 1))
                file.write(pixels.data)
                digest.update(pixels.data)
            labels.append(own)
            side = planes.shape[2]
            del planes  # before the next part is read
    with replacing(path.with_suffix(".npz")) as file:
        np.savez(
            file,
            labels=np.concatenate(labels),
            lengths=np.array([len(own) for own in labels]),
            side=np.array(side),
            sha256=np.array(digest.hexdigest()),
            identity=np.array(_identity(path.with_suffix(".images"))),
        )


def _identity(path: Path) -> list[int]:
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]
