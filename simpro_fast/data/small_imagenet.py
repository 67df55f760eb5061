"""ImageNet-1k downsampled to 32 or 64 px (Chrabaszcz et al. 2017), with 1000 or 127 classes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.config.schema import DataConfig
from simpro_fast.data.dataset import ArrayDataset, checked_labels, reading
from simpro_fast.data.imagenet_classes import (
    NUM_CLASSES,
    class_list,
    merged,
    superclasses,
)
from simpro_fast.data.unpickle import entry, load_pickled_dict
from simpro_fast.errors import ConfigError, UserError

_TRAIN = tuple(f"train_data_batch_{i}" for i in range(1, 11))
_VAL = "val_data"


def load_small_imagenet_1k(data: DataConfig) -> ArrayDataset:
    """All 1000 classes in the order of the files, which makes the first one the head."""
    listed = class_list(data.class_list)
    train, val = _read_parts(data)
    return _dataset(data, train, val, listed.names)


def load_small_imagenet_127(data: DataConfig) -> ArrayDataset:
    """The same files with the classes merged into their 127 parents, head first.

    Classes are numbered by descending labeled count (`data.labeled_fraction` of their images;
    without it by their images), equal ones by WordNet id.
    """
    listed = class_list(data.class_list)
    _, names = superclasses(listed)
    (images, classes), (test_images, test_classes) = _read_parts(data)
    if len(classes) and classes.max() < len(names):
        raise UserError(
            f"{data.name}: no label in the training files is above {len(names)}, so their classes "
            "are merged already; use the published files with labels 1 to 1000"
        )
    labels, test_labels, names = merged(classes, test_classes, listed, data.labeled_fraction)
    return _dataset(data, (images, labels), (test_images, test_labels), names)


def _dataset(
    data: DataConfig,
    train: tuple[np.ndarray, np.ndarray],
    val: tuple[np.ndarray, np.ndarray],
    names: tuple[str, ...],
) -> ArrayDataset:
    return ArrayDataset(
        name=data.name,
        images=train[0],
        labels=train[1],
        class_names=names,
        test_images=val[0],
        test_labels=val[1],
        mean=(0.48109809, 0.45747185, 0.40785507),
        std=(0.26040889, 0.2532126, 0.26820634),
        flip=True,
    )


def _read_parts(
    data: DataConfig,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images and 0-based labels of the training and the validation files."""
    root = data.root or Path("data")
    paths = [_file(root, name, data.name) for name in (*_TRAIN, _VAL)]
    batches = [read_batch(path) for path in paths]
    sides = [planar.shape[2] for planar, _ in batches]
    for path, side in zip(paths, sides, strict=True):
        if side != sides[0]:
            raise UserError(f"{path}: images of {side} px, but {paths[0]} has {sides[0]} px")
    if data.image_size not in (None, sides[0]):
        raise ConfigError(
            f"data.image_size={data.image_size}: the files in {root} hold {sides[0]} px; "
            "set data.root to those of the wanted size"
        )
    val = [batches.pop()]
    return _join(batches), _join(val)


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


def _join(batches: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """uint8 [N, s, s, 3] images and labels. Empties the list, so that each batch is freed as soon
    as it is copied: the whole set is 16 GB at 64 px and must not be held twice."""
    labels = np.concatenate([part for _, part in batches])
    side = batches[0][0].shape[2]
    images = np.empty((len(labels), side, side, 3), np.uint8)
    start = 0
    while batches:
        planar, _ = batches.pop(0)
        images[start : start + len(planar)] = planar.transpose(0, 2, 3, 1)
        start += len(planar)
    return images, labels
