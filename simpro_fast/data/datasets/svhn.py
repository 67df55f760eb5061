"""SVHN (street view house numbers), the cropped 32x32 digits in MATLAB files."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset, check_size, checked_labels
from simpro_fast.utils.errors import UserError

_HOME = "http://ufldl.stanford.edu/housenumbers/"


def load_svhn(data: DataConfig) -> ArrayDataset:
    """SVHN from `train_32x32.mat` and `test_32x32.mat` in `data.root` or `data/`.

    The third published part, `extra_32x32.mat`, is not used. A digit's mirror image is no digit,
    so the set is never flipped. Statistics are those of the training part.
    """
    check_size(data, 32)
    root = data.root or Path("data")
    images, labels = read_svhn_part(_part(root, "train"))
    test_images, test_labels = read_svhn_part(_part(root, "test"))
    return ArrayDataset(
        name="svhn",
        images=images,
        labels=labels,
        class_names=tuple(str(digit) for digit in range(10)),
        test_images=test_images,
        test_labels=test_labels,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.1980, 0.2010, 0.1970),
        flip=False,
    )


def _part(root: Path, part: str) -> Path:
    path = root / f"{part}_32x32.mat"
    if not path.is_file():
        raise UserError(
            f"svhn: {path.name} is not in {root}; get train_32x32.mat and test_32x32.mat from "
            f"{_HOME} and set data.root to their folder"
        )
    return path


def read_svhn_part(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Read one MATLAB (version 5) file: `X` uint8 [32, 32, 3, N] and `y` [N, 1] of 1..10.

    Returns:
        images uint8 [N, 32, 32, 3] and labels int64 [N], the file's 10 (the digit 0) as 0.

    Raises:
        UserError: damaged, or of another format.
    """
    from scipy.io import loadmat

    try:
        content = loadmat(str(path), variable_names=["X", "y"])
    except Exception as error:  # scipy raises any type on a damaged file
        reason = (str(error) or type(error).__name__).splitlines()[0]
        line = f"{path}: damaged or not a MATLAB 5 file ({reason}); fetch it again"
        raise UserError(line) from None
    for key in ("X", "y"):
        if key not in content:
            raise UserError(f"{path}: has no variable {key}; it is not the published file")
    pixels, labels = content["X"], np.asarray(content["y"])
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:3] != (32, 32, 3):
        raise UserError(
            f"{path}: X is {pixels.dtype} {list(pixels.shape)}, expected uint8 [32, 32, 3, N]"
        )
    count = pixels.shape[3]
    if labels.shape != (count, 1):
        raise UserError(f"{path}: y is {list(labels.shape)}, expected [{count}, 1]")
    digits = checked_labels(labels[:, 0], count, 11, str(path))
    if count and digits.min() < 1:
        raise UserError(f"{path}: y holds 0, expected 1 to 10, where 10 is the digit 0")
    digits[digits == 10] = 0
    return np.ascontiguousarray(pixels.transpose(3, 0, 1, 2)), digits
