"""Fashion-MNIST, and the idx format of the MNIST family."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

import numpy as np
from PIL import Image

from simpro_fast.config.data import DataConfig, Interpolation
from simpro_fast.data.augment.crops import RESAMPLING
from simpro_fast.data.datasets.base import (
    ArrayDataset,
    checked_labels,
    gray_to_rgb,
    reading,
)
from simpro_fast.utils.errors import ConfigError, UserError

_SIDE = 28
_STD = {28: 0.3530, 14: 0.3301}
"""Standard deviation of the pixels, by side of the images; of larger ones that of 28 px."""
_FASHION_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def load_fashion_mnist(data: DataConfig) -> ArrayDataset:
    """Fashion-MNIST from its four idx files, compressed or not.

    With `data.image_size=14` a pixel is the mean of four, for runs at a quarter of the cost; a
    larger size, as pretrained networks want it, is scaled by `data.interpolation`.
    """
    side = data.image_size or _SIDE
    if side < _SIDE and side not in _STD:
        raise ConfigError(
            f"data.image_size={side}: fashion_mnist is used at 14 px, or 28 and more; set one of "
            "these"
        )
    root = data.root or _FASHION_DEBIAN
    parts = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images_path = _fashion_file(root, f"{prefix}-images-idx3-ubyte")
        labels_path = _fashion_file(root, f"{prefix}-labels-idx1-ubyte")
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (_SIDE, _SIDE):
            raise UserError(f"{images_path}: holds {list(images.shape)}, expected [N, 28, 28]")
        images = _resized(images, side, data.interpolation or "bilinear")
        parts[part] = gray_to_rgb(images), checked_labels(labels, len(images), 10, str(labels_path))
    return ArrayDataset(
        name="fashion_mnist",
        images=parts["train"][0],
        labels=parts["train"][1],
        class_names=_FASHION_CLASSES,
        test_images=parts["test"][0],
        test_labels=parts["test"][1],
        mean=(0.2860, 0.2860, 0.2860),
        std=(_STD.get(side, _STD[_SIDE]),) * 3,
        flip=True,
    )


def _resized(images: np.ndarray, side: int, interpolation: Interpolation) -> np.ndarray:
    """uint8 [N, 28, 28] to [N, side, side]; half of it is the mean of four pixels, halves up."""
    if side == _SIDE:
        return images
    if side > _SIDE:
        resampling = RESAMPLING[interpolation]
        larger = (Image.fromarray(image).resize((side, side), resampling) for image in images)
        return np.stack([np.asarray(image) for image in larger])
    four = images[:, ::2, ::2].astype(np.uint16)
    for y, x in ((0, 1), (1, 0), (1, 1)):
        four += images[:, y::2, x::2]
    return ((four + 2) // 4).astype(np.uint8)


def _fashion_file(root: Path, name: str) -> Path:
    for path in (root / f"{name}.gz", root / name):
        if path.is_file():
            return path
    raise UserError(
        f"fashion_mnist: {name}.gz is not in {root}; `apt install dataset-fashion-mnist`, or set "
        "data.root to the folder of the four idx files"
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes (the MNIST format), gzip-compressed or not.

    The format: two zero bytes, the element type (8 is unsigned byte), the number of dimensions,
    each dimension as a big-endian 32-bit integer, the elements in C order.

    Raises:
        UserError: cut short, too long, or not an idx file of unsigned bytes.
    """
    with reading(path):
        content = path.read_bytes()
        if content[:2] == b"\x1f\x8b":
            content = gzip.decompress(content)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise UserError(f"{path}: not an idx file (starts with {content[:4].hex() or 'nothing'})")
    if content[2] != 8:
        raise UserError(f"{path}: idx element type {content[2]:#04x}, expected 0x08 (bytes)")
    header = 4 + 4 * content[3]
    if len(content) < header:
        raise UserError(f"{path}: cut short inside the header; fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(content[4:header], ">u4"))
    expected = header + math.prod(shape)
    if len(content) != expected:
        problem = "cut short" if len(content) < expected else "too long"
        raise UserError(
            f"{path}: {problem}, {len(content)} bytes where its header {list(shape)} needs "
            f"{expected}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
