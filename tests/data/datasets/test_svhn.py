"""SVHN: column-major MATLAB files, 10 for the digit 0, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.datasets.svhn import read_svhn_part
from simpro_fast.data.loader import resolve_augment
from simpro_fast.utils.errors import UserError
from tests.data.svhn_format import mat_file, write_svhn

# Two images, byte by byte as MATLAB's documentation of the format has it.
GOLDEN = (
    b"MATLAB 5.0 MAT-file" + b" " * 105 + b"\x00\x01IM"  # 124 bytes of text, version, little-endian
    b"\x0e\x00\x00\x00\x38\x18\x00\x00"  # matrix of 6200 bytes
    b"\x06\x00\x00\x00\x08\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00"  # class uint8
    b"\x05\x00\x00\x00\x10\x00\x00\x00"  # four dimensions
    b"\x20\x00\x00\x00\x20\x00\x00\x00\x03\x00\x00\x00\x02\x00\x00\x00"  # 32 x 32 x 3 x 2
    b"\x01\x00\x01\x00X\x00\x00\x00"  # its name, a short element
    b"\x02\x00\x00\x00\x00\x18\x00\x00"  # 6144 bytes: first image, red plane, ...
    + b"\x11\x22" + b"\x00" * 30  # column 0: rows 0 and 1
    + b"\x33" + b"\x00" * 31  # column 1
    + b"\x00" * 960  # the other 30 columns
    + b"\x44" + b"\x00" * 1023  # green
    + b"\x00" * 1023 + b"\x55"  # blue: the last row of the last column
    + b"\x66" + b"\x00" * 3071  # second image
    + b"\x0e\x00\x00\x00\x30\x00\x00\x00"  # matrix of 48 bytes
    b"\x06\x00\x00\x00\x08\x00\x00\x00\x09\x00\x00\x00\x00\x00\x00\x00"
    b"\x05\x00\x00\x00\x08\x00\x00\x00\x02\x00\x00\x00\x01\x00\x00\x00"  # 2 x 1
    b"\x01\x00\x01\x00y\x00\x00\x00"
    b"\x02\x00\x02\x00\x0a\x09\x00\x00"  # two labels: 10 and 9
)  # fmt: skip


def test_golden_file(tmp_path: Path) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(GOLDEN)
    images, labels = read_svhn_part(path)
    assert images.shape == (2, 32, 32, 3) and images.dtype == np.uint8
    assert labels.tolist() == [0, 9] and labels.dtype == np.int64
    expected = np.zeros((2, 32, 32, 3), np.uint8)
    expected[0, 0, 0] = 0x11, 0x44, 0
    expected[0, 1, 0, 0] = 0x22
    expected[0, 0, 1, 0] = 0x33
    expected[0, 31, 31, 2] = 0x55
    expected[1, 0, 0, 0] = 0x66
    np.testing.assert_array_equal(images, expected)
    assert images.flags.c_contiguous


@pytest.mark.parametrize("compressed", [True, False])
def test_data_set(tmp_path: Path, compressed: bool) -> None:
    write_svhn(tmp_path)
    images = np.random.default_rng(5).integers(0, 256, (20, 32, 32, 3), np.uint8)
    digits = np.arange(20) % 10
    test = tmp_path / "test_32x32.mat"
    test.write_bytes(mat_file(images, digits, compressed=compressed))
    dataset = load_dataset(DataConfig(name="svhn", root=tmp_path))
    assert dataset.images.shape == (100, 32, 32, 3)
    assert np.bincount(dataset.labels).tolist() == [10] * 10
    assert dataset.test_images is not None and dataset.test_labels is not None
    np.testing.assert_array_equal(dataset.test_images, images)
    assert dataset.test_labels.tolist() == digits.tolist()
    assert dataset.class_names == tuple("0123456789")
    assert (dataset.mean, dataset.std) == ((0.4377, 0.4438, 0.4728), (0.198, 0.201, 0.197))
    assert not resolve_augment(DataConfig(name="svhn"), dataset).flip


LABEL_0 = GOLDEN[:-4] + b"\x00\x09\x00\x00"
LABEL_11 = GOLDEN[:-4] + b"\x0b\x09\x00\x00"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "damaged or not a MATLAB 5 file"),
        (b"<html>not found</html>" * 20, "damaged or not a MATLAB 5 file"),
        (GOLDEN[:3000], "damaged or not a MATLAB 5 file"),
        (GOLDEN[:-56], "has no variable y"),
        (GOLDEN.replace(b"X\x00\x00\x00", b"Z\x00\x00\x00"), "has no variable X"),
        (LABEL_0, "y holds 0, expected 1 to 10"),
        (LABEL_11, "labels go from 9 to 11"),
        (
            GOLDEN.replace(b"\x03\0\0\0\x02\0\0\0", b"\x02\0\0\0\x03\0\0\0"),
            r"X is uint8 \[32, 32, 2",
        ),
        (
            GOLDEN.replace(b"\x02\0\0\0\x01\0\0\0\x01\0", b"\x01\0\0\0\x02\0\0\0\x01\0"),
            r"y is \[1, 2\]",
        ),
    ],
)
def test_foreign_files_are_one_line(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "train_32x32.mat"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"train_32x32\.mat: .*{message}") as info:
        read_svhn_part(path)
    assert "\n" not in str(info.value)
