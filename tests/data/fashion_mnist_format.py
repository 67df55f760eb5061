"""Writes small Fashion-MNIST files in the published format: idx, compressed."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np


def idx_bytes(array: np.ndarray) -> bytes:
    header = struct.pack(">HBB", 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_fashion(root: Path, train: int = 20, test: int = 10) -> None:
    rng = np.random.default_rng(0)
    for prefix, count in (("train", train), ("t10k", test)):
        images = rng.integers(0, 256, (count, 28, 28))
        labels = np.arange(count) % 10
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            path = root / f"{prefix}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx_bytes(array)))
