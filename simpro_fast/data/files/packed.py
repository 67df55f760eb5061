"""All images of a manifest at one small size, as one memory-mapped array.

`packed_<px>.npy` is uint8 [N, px, px, 3], one image per usable row of the manifest, in its order;
`packed_<px>.json` beside it is the index: the manifest's fingerprint, the number of images and the
fields of their `Square`. Pictures are those of square.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.files.manifest import Manifest
from simpro_fast.data.files.square import row_square
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.parallel_map import in_order
from simpro_fast.utils.regular_file import read_text


def packed_path(folder: Path, size: int) -> Path:
    return folder / f"packed_{size}.npy"


def is_packed(manifest: Manifest, folder: Path, square: Square) -> bool:
    """Whether `folder` holds the array of exactly this manifest, made so."""
    path = packed_path(folder, square.size)
    try:
        index = json.loads(read_text(path.with_suffix(".json")))
        return bool(path.is_file() and index == _index(manifest, square))
    except (OSError, ValueError):
        return False


def pack(
    manifest: Manifest,
    folder: Path,
    square: Square,
    *,
    threads: int,
    progress: Callable[[int], None],
) -> Path:
    """Write the array and its index; what was there stays until both are whole. Returns the path.

    Raises:
        UserError: an image that cannot be read any more, or a full disk.
    """
    size = square.size
    path = packed_path(folder, size)
    rows = manifest.usable().rows
    index = path.with_suffix(".json")
    with replacing(index) as index_file, replacing(path) as file:
        index_file.write((json.dumps(_index(manifest, square), indent=1) + "\n").encode())
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(rows), size, size, 3)}
        np.lib.format.write_array_header_1_0(file, header)
        pictures = in_order(lambda row: row_square(row, square), rows, threads)
        for done, picture in enumerate(pictures, start=1):
            file.write(picture.tobytes())
            progress(done)
        for whole in (index_file, file):  # a full disk is noticed here
            whole.flush()
            os.fsync(whole.fileno())
        index.unlink(missing_ok=True)  # between the two renames, never old beside new
    return path


def open_packed(
    path: Path, manifest: Manifest, data: DataConfig, mean: Sequence[float]
) -> np.ndarray:
    """The array, memory-mapped read-only.

    Args:
        data, mean: see `Square.configured`; without `data.image_size` that of the array.

    Raises:
        UserError: missing, damaged or cut, made of another manifest, of another size, or otherwise
            than `data` asks.
    """
    index_path = path.with_suffix(".json")
    try:
        index = json.loads(read_text(index_path))
        images: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be used ({reason}); run prepare --pack again") from None
    size = images.shape[1] if images.ndim == 4 else 0
    if data.image_size not in (None, size):
        raise UserError(
            f"{path}: holds {size} px images, data.image_size={data.image_size} was asked; "
            f"run prepare --pack {data.image_size}"
        )
    expected = _index(manifest, Square.configured(data, size, mean))
    for key in ("fit", "interpolation", "fill"):
        if isinstance(index, dict) and (theirs := index.get(key)) != expected[key]:
            raise UserError(
                f"{path}: packed with {key} {str(theirs)[:40]}, and the configuration gives "
                f"{expected[key]} (data.fit, data.interpolation, data.mean); set these as they "
                f"were, or run prepare --config FILE --pack {size} with this configuration"
            )
    if index != expected or images.shape != (expected["images"], size, size, 3):
        raise UserError(f"{path}: was made of another manifest; run prepare --pack {size} again")
    return images


def _index(manifest: Manifest, square: Square) -> dict[str, Any]:
    return {
        "manifest_fingerprint": manifest.fingerprint(),
        "images": len(manifest.usable().rows),
        **asdict(square),
        "fill": list(square.fill),  # as JSON gives it back
    }
