"""All images of a manifest at one small size, as one memory-mapped array.

`packed_<px>.npy` is uint8 [N, px, px, 3], one image per usable row of the manifest, in its order;
`packed_<px>.json` beside it is the index: the manifest's fingerprint, the size and the number of
images. Pictures are those of square.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.data.files.manifest import Manifest
from simpro_fast.data.files.square import square
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.parallel_map import in_order
from simpro_fast.utils.regular_file import read_text


def packed_path(folder: Path, size: int) -> Path:
    return folder / f"packed_{size}.npy"


def is_packed(manifest: Manifest, folder: Path, size: int) -> bool:
    """Whether `folder` holds the array of exactly this manifest."""
    path = packed_path(folder, size)
    try:
        index = json.loads(read_text(path.with_suffix(".json")))
        return bool(path.is_file() and index == _index(manifest, size))
    except (OSError, ValueError):
        return False


def pack(
    manifest: Manifest, folder: Path, size: int, *, threads: int, progress: Callable[[int], None]
) -> Path:
    """Write the array and its index; what was there stays until both are whole. Returns the path.

    Raises:
        UserError: an image that cannot be read any more, or a full disk.
    """
    path = packed_path(folder, size)
    rows = manifest.usable().rows
    index = path.with_suffix(".json")
    with replacing(index) as index_file, replacing(path) as file:
        index_file.write((json.dumps(_index(manifest, size), indent=1) + "\n").encode())
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(rows), size, size, 3)}
        np.lib.format.write_array_header_1_0(file, header)
        pictures = in_order(lambda row: square(row, size), rows, threads)
        for done, picture in enumerate(pictures, start=1):
            file.write(picture.tobytes())
            progress(done)
        for whole in (index_file, file):  # a full disk is noticed here
            whole.flush()
            os.fsync(whole.fileno())
        index.unlink(missing_ok=True)  # between the two renames, never old beside new
    return path


def open_packed(path: Path, manifest: Manifest, image_size: int | None) -> np.ndarray:
    """The array, memory-mapped read-only.

    Raises:
        UserError: missing, damaged or cut, made of another manifest, or of another size.
    """
    index_path = path.with_suffix(".json")
    try:
        index = json.loads(read_text(index_path))
        images: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be used ({reason}); run prepare --pack again") from None
    size = images.shape[1] if images.ndim == 4 else 0
    if image_size not in (None, size):
        raise UserError(
            f"{path}: holds {size} px images, data.image_size={image_size} was asked; "
            f"run prepare --pack {image_size}"
        )
    expected = _index(manifest, size)
    if index != expected or images.shape != (expected["images"], size, size, 3):
        raise UserError(f"{path}: was made of another manifest; run prepare --pack {size} again")
    return images


def _index(manifest: Manifest, size: int) -> dict[str, Any]:
    return {
        "manifest_fingerprint": manifest.fingerprint(),
        "image_size": size,
        "images": len(manifest.usable().rows),
    }
