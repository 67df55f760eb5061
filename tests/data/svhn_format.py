"""Writes SVHN files in the published format: MATLAB 5, digit 0 as 10."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from scipy.io import savemat


def mat_file(images: np.ndarray, digits: np.ndarray, *, compressed: bool = True) -> bytes:
    """A file of images uint8 [N, 32, 32, 3] and digits 0..9."""
    file = io.BytesIO()
    labels = np.where(digits == 0, 10, digits).astype(np.uint8)[:, None]
    content = {"X": images.transpose(1, 2, 3, 0), "y": labels}
    savemat(file, content, do_compression=compressed)
    return file.getvalue()


def write_svhn(root: Path, per_class: int = 10) -> None:
    """Both parts; the training part has `per_class` images of each digit, the test part two."""
    for seed, (part, count) in enumerate((("train", per_class), ("test", 2))):
        images = np.random.default_rng(seed).integers(0, 256, (10 * count, 32, 32, 3), np.uint8)
        (root / f"{part}_32x32.mat").write_bytes(mat_file(images, np.arange(10 * count) % 10))
