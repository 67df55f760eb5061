"""ImageNet-1k downsampled to 32 or 64 px (Chrabaszcz et al. 2017), with 1000 or 127 classes."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset, checked_labels, reading
from simpro_fast.data.datasets.imagenet_classes import (
    NUM_CLASSES,
    class_list,
    merged,
    superclasses,
)
from simpro_fast.data.datasets.memmap_cache import MappedImages, mapped_images
from simpro_fast.data.datasets.safe_pickle import entry, load_pickled_dict
from simpro_fast.utils.errors import ConfigError, UserError

_TRAIN = tuple(f"train_data_batch_{i}" for i in range(1, 11))
_VAL = "val_data"


def load_small_imagenet_1k(data: DataConfig) -> ArrayDataset:
    """All 1000 classes in the order of the files, which makes the first one the head."""
    listed = class_list(data.class_list)
    files = _copied(data)
    first_test = len(files.labels) - files.lengths[-1]
    return _dataset(data, files, files.labels[:first_test], files.labels[first_test:], listed.names)


def load_small_imagenet_127(data: DataConfig) -> ArrayDataset:
    """The same files with the classes merged into their 127 parents, head first.

    Classes are numbered by descending labeled count (`data.labeled_fraction` of their images;
    without it by their images), equal ones by WordNet id.
    """
    listed = class_list(data.class_list)
    _, names = superclasses(listed)
    files = _copied(data)
    first_test = len(files.labels) - files.lengths[-1]
    classes, test_classes = files.labels[:first_test], files.labels[first_test:]
    if len(classes) and classes.max() < len(names):
        raise UserError(
            f"{data.name}: no label in the training files is above {len(names)}, so their classes "
            "are merged already; use the published files with labels 1 to 1000"
        )
    labels, test_labels, names = merged(classes, test_classes, listed, data.labeled_fraction)
    return _dataset(data, files, labels, test_labels, names)


def _dataset(
    data: DataConfig,
    files: MappedImages,
    labels: np.ndarray,
    test_labels: np.ndarray,
    names: tuple[str, ...],
) -> ArrayDataset:
    return ArrayDataset(
        name=data.name,
        images=files.images[: len(labels)],
        labels=labels,
        class_names=names,
        test_images=files.images[len(labels) :],
        test_labels=test_labels,
        mean=(0.48109809, 0.45747185, 0.40785507),
        std=(0.26040889, 0.2532126, 0.26820634),
        flip=True,
        images_sha256=files.sha256,
    )


def _copied(data: DataConfig) -> MappedImages:
    """Images and 0-based labels of the training and, last, the validation file.

    The pickles are copied once into files that are mapped, 16 GB at 64 px, in `data.cache_dir`
    (default: beside the training files).
    """
    root, paths = _root(data), find_files(data)
    with reading(root):
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    state = hashlib.sha256(repr(stats).encode()).hexdigest()[:16]
    folder = data.cache_dir or paths[0].parent
    copied = mapped_images(folder / f"small_imagenet_{state}", lambda: _read_parts(paths))
    side = copied.images.shape[1]
    if data.image_size not in (None, side):
        raise ConfigError(
            f"data.image_size={data.image_size}: the files in {root} hold {side} px; "
            "set data.root to those of the wanted size"
        )
    return copied


def _read_parts(paths: list[Path]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The files one after another; only one is in memory at a time (1.6 GB at 64 px)."""
    side = None
    for path in paths:
        planes, labels = read_batch(path)
        side = side or planes.shape[2]
        if planes.shape[2] != side:
            raise UserError(f"{path}: images of {planes.shape[2]} px, but {paths[0]} has {side} px")
        yield planes, labels
        del planes


def _root(data: DataConfig) -> Path:
    return data.root or Path("data")


def find_files(data: DataConfig) -> list[Path]:
    """The training files and, last, the validation file.

    Raises:
        UserError: one of them is missing, or there twice.
    """
    return [_file(_root(data), name, data.name) for name in (*_TRAIN, _VAL)]


def _file(root: Path, name: str, dataset: str) -> Path:
    """In `root` or in one of its folders, as the archives unpack."""
    found = [path for path in (root / name, *sorted(root.glob(f"*/{name}"))) if path.is_file()]
    if len(found) > 1:
        raise UserError(f"{dataset}: {name} is in {found[0].parent} and in {found[1].parent}; "
                        "set data.root to one of them")  # fmt: skip
    if not found:
        raise UserError(
            f"{dataset}: {name} is neither in {root} nor in a folder of it; get the downsampled "
            "training and validation files (32 or 64 px, python) from https://image-net.org and "
            "set data.root to their folder"
        )
    return found[0]


def read_batch(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one pickled file: `data` uint8 [n, 3 * s * s] of red, green, blue planes, `labels`.

    Returns:
        uint8 [n, 3, s, s] and int64 [n] labels from 0 (the file's less 1).

    Raises:
        UserError: damaged, of another format, or naming what image files do not need.
    """
    with reading(path), path.open("rb") as file:
        content = load_pickled_dict(file, str(path))
    planar: Any = entry(content, "data", path)
    if not isinstance(planar, np.ndarray) or planar.dtype != np.uint8 or planar.ndim != 2:
        raise UserError(f"{path}: data is no uint8 [n, 3 * side * side]")
    side = math.isqrt(planar.shape[1] // 3)
    if 3 * side * side != planar.shape[1] or side < 8:
        raise UserError(f"{path}: data has rows of {planar.shape[1]}, expected 3 * side * side")
    labels = checked_labels(entry(content, "labels", path), len(planar), NUM_CLASSES + 1, str(path))
    if len(labels) and labels.min() < 1:
        raise UserError(f"{path}: labels start at 0, expected 1 to {NUM_CLASSES}")
    return planar.reshape(-1, 3, side, side), labels - 1
