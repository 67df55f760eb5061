"""Writes SVHN files in the published format: MATLAB 5, matrices column-major, digit 0 as 10."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np


def _element(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", kind, len(content)) + content + b"\0" * (-len(content) % 8)


def _matrix(name: bytes, shape: tuple[int, ...], column_major: bytes) -> bytes:
    flags = struct.pack("<II", 9, 0)  # uint8 matrix
    body = _element(6, flags) + _element(5, struct.pack(f"<{len(shape)}i", *shape))
    body += _element(1, name) + _element(2, column_major)
    return _element(14, body)


def mat_file(images: np.ndarray, digits: np.ndarray, *, compressed: bool = True) -> bytes:
    """A file of images uint8 [N, 32, 32, 3] and digits 0..9."""
    count = len(images)
    x = b"".join(
        images[n, :, column, channel].tobytes()
        for n in range(count)
        for channel in range(3)
        for column in range(32)
    )
    y = bytes(10 if digit == 0 else int(digit) for digit in digits)
    content = b"MATLAB 5.0 MAT-file".ljust(124, b" ") + b"\x00\x01IM"
    for matrix in (_matrix(b"X", (32, 32, 3, count), x), _matrix(b"y", (count, 1), y)):
        packed = zlib.compress(matrix)
        content += struct.pack("<II", 15, len(packed)) + packed if compressed else matrix
    return content


def write_svhn(root: Path, per_class: int = 10) -> None:
    """Both parts; the training part has `per_class` images of each digit, the test part two."""
    for seed, (part, count) in enumerate((("train", per_class), ("test", 2))):
        images = np.random.default_rng(seed).integers(0, 256, (10 * count, 32, 32, 3), np.uint8)
        (root / f"{part}_32x32.mat").write_bytes(mat_file(images, np.arange(10 * count) % 10))
