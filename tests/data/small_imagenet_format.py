"""Writes downsampled ImageNet files in the published format: pickled planes and labels from 1."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np


def planes(labels: np.ndarray, side: int) -> np.ndarray:
    """uint8 [n, 3 * side * side]: red and green spell each image's label, blue is noise."""
    pixels = np.empty((len(labels), 3, side * side), np.uint8)
    pixels[:, 0] = (labels >> 8)[:, None]
    pixels[:, 1] = (labels & 255)[:, None]
    pixels[:, 2] = np.random.default_rng(len(labels)).integers(0, 256, (len(labels), side * side))
    return pixels.reshape(len(labels), -1)


def spelled(images: np.ndarray) -> np.ndarray:
    """The labels that images [n, side, side, 3] spell, read back at their last pixel."""
    return images[:, -1, -1, 0].astype(np.int64) * 256 + images[:, -1, -1, 1]


def write_batch(path: Path, labels: np.ndarray, side: int, **extra: object) -> None:
    content = {"data": planes(labels, side), "labels": labels.tolist(), **extra}
    path.write_bytes(pickle.dumps(content, protocol=2))


def write_small_imagenet(
    train: Path, val: Path, per_class: int | np.ndarray, val_labels: np.ndarray, side: int = 32
) -> None:
    """Ten training files with `per_class` images of the labels 1 to 1000, and the validation."""
    train.mkdir(parents=True, exist_ok=True)
    val.mkdir(parents=True, exist_ok=True)
    labels = np.repeat(np.arange(1, 1001), per_class)
    labels = np.random.default_rng(0).permutation(labels)
    mean = np.full(3 * side * side, 118.0)
    for i, part in enumerate(np.array_split(labels, 10), start=1):
        write_batch(train / f"train_data_batch_{i}", part, side, mean=mean)
    write_batch(val / "val_data", val_labels, side)
