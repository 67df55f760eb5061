"""STL-10 from the published binary files, resized once and kept as arrays."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

from simpro_fast.config.data import DataConfig, Interpolation
from simpro_fast.data.augment.crops import RESAMPLING
from simpro_fast.data.datasets.base import (
    ArrayDataset,
    checked_labels,
    find_published,
    published_files,
    reading,
)
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import ConfigError, OutputError, UserError
from simpro_fast.utils.npz import read_npz

logger = logging.getLogger(__name__)

_FOLDER, _ARCHIVE = "stl10_binary", "stl10_binary.tar.gz"
_HOME = "https://cs.stanford.edu/~acoates/stl10/"
_SIDE = 96
_BYTES = 3 * _SIDE * _SIDE
_IMAGES = {"train": "train_X.bin", "test": "test_X.bin", "unlabeled": "unlabeled_X.bin"}
_LABELS = {"train": "train_y.bin", "test": "test_y.bin"}
_WANTED = (*_IMAGES.values(), *_LABELS.values())
_CLASSES = (
    *("airplane", "bird", "car", "cat", "deer"),
    *("dog", "horse", "monkey", "ship", "truck"),
)


def load_stl10(data: DataConfig) -> ArrayDataset:
    """STL-10 at `data.image_size` px (default 32, at most 96): `train`, `test` and `unlabeled`.

    Images are made smaller once, by Pillow's antialiased filter of `data.interpolation` (bilinear
    in the published experiments), and kept in `data.cache_dir` (default: beside the files).
    Statistics are those of CIFAR-10, also as published. The files know no labels of the unlabeled
    part.
    """
    side = 32 if data.image_size is None else data.image_size
    if not 8 <= side <= _SIDE:
        raise ConfigError(
            f"data.image_size={side}: stl10 has images of {_SIDE} px and is used at 8 to {_SIDE}; "
            "32 is the published choice"
        )
    source = find_stl10(data)
    folder = data.cache_dir or (source if source.is_dir() else source.parent)
    parts = _cached(source, side, data.interpolation or "bilinear", folder)
    return ArrayDataset(
        name="stl10",
        images=parts["train_images"],
        labels=parts["train_labels"],
        class_names=_CLASSES,
        test_images=parts["test_images"],
        test_labels=parts["test_labels"],
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2471, 0.2435, 0.2616),
        flip=True,
        unlabeled_images=parts["unlabeled_images"],
    )


def find_stl10(data: DataConfig) -> Path:
    """The folder of the binary files, or the archive. Raises as `find_published` does."""
    return find_published(data, _FOLDER, _ARCHIVE, _IMAGES["train"], _HOME)


def _cached(
    source: Path, side: int, interpolation: Interpolation, folder: Path
) -> dict[str, np.ndarray]:
    """The parts at `side` px, from the file that an earlier start made of the same files.

    Any number of processes may start at once: each file is whole or absent, and all are equal.
    """
    path = folder / f"stl10_{side}px_{interpolation}_{_state(source)}.npz"
    try:
        return read_npz(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError):
        logger.warning("%s is damaged; it is made again", path)
    logger.info("stl10: resizing %s to %d px, stored in %s", source, side, path)
    parts = _read(source, side, interpolation)
    try:
        with replacing(path) as kept:
            np.savez(kept, **parts)  # type: ignore[arg-type]
    except OutputError as error:
        raise OutputError(f"{error}; or set data.cache_dir") from None
    return parts


def _state(source: Path) -> str:
    """Changes with the size or the time of any file."""
    files = [source] if source.is_file() else [source / name for name in _WANTED]
    with reading(source):
        stats = [(file.name, file.stat()) for file in files if file.exists()]
    described = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.sha256(repr(described).encode()).hexdigest()[:16]


def _read(source: Path, side: int, interpolation: Interpolation) -> dict[str, np.ndarray]:
    """uint8 [n, side, side, 3] images of the three parts, int64 [n] labels of two."""
    found: dict[str, np.ndarray] = {}
    with reading(source):
        for name, file, size in published_files(source, _FOLDER, _WANTED):
            if name in _IMAGES.values():
                found[name] = read_images(file, size, side, interpolation, str(source / name))
            else:
                found[name] = np.frombuffer(file.read(), np.uint8)
    parts = {f"{part}_images": found[name] for part, name in _IMAGES.items()}
    for part, name in _LABELS.items():
        where = str(source / name)
        labels = checked_labels(found[name], len(parts[f"{part}_images"]), 11, where)
        if len(labels) and labels.min() < 1:
            raise UserError(f"{where}: holds label 0, expected 1 to 10")
        parts[f"{part}_labels"] = labels - 1
    return parts


def read_images(
    file: BinaryIO, size: int, side: int, interpolation: Interpolation, source: str
) -> np.ndarray:
    """Read images of 3 planes of 96 x 96 bytes, each plane column after column.

    Args:
        file: opened for reading bytes.
        size: its length in bytes.
        side: of the returned images, pixels.
        interpolation: how they are scaled to it.
        source: how errors call the file.

    Returns:
        uint8 [n, side, side, 3].

    Raises:
        UserError: not a whole number of images, or cut short.
    """
    count, rest = divmod(size, _BYTES)
    if rest:
        raise UserError(
            f"{source}: {size} bytes are not a whole number of {_BYTES}-byte images; fetch it again"
        )
    images = np.empty((count, side, side, 3), np.uint8)
    for n in range(count):
        raw = file.read(_BYTES)
        if len(raw) < _BYTES:
            raise UserError(f"{source}: cut short at image {n} of {count}; fetch it again")
        image = np.frombuffer(raw, np.uint8).reshape(3, _SIDE, _SIDE).transpose(2, 1, 0)
        if side != _SIDE:
            picture = Image.fromarray(np.ascontiguousarray(image))
            image = np.asarray(picture.resize((side, side), RESAMPLING[interpolation]))
        images[n] = image
    return images
