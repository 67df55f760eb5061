"""Data sets by name, as arrays: uint8 images [N, H, W, 3], labels and class names."""

from __future__ import annotations

import difflib
from collections.abc import Callable

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset, gray_to_rgb
from simpro_fast.data.datasets.cifar import load_cifar
from simpro_fast.data.datasets.fashion_mnist import load_fashion_mnist
from simpro_fast.data.datasets.small_imagenet import load_small_imagenet_1k, load_small_imagenet_127
from simpro_fast.data.datasets.stl10 import load_stl10
from simpro_fast.data.datasets.svhn import load_svhn
from simpro_fast.data.datasets.synthetic import load_synthetic
from simpro_fast.errors import ConfigError

__all__ = ["ArrayDataset", "dataset_names", "load_dataset"]


def load_dataset(data: DataConfig) -> ArrayDataset:
    """Load the data set `data.name` from `data.root` or the place where it usually lies.

    Raises:
        ConfigError: unknown name, or an image size that the set does not have.
        UserError: files missing, damaged or of another format.
    """
    try:
        loader = _LOADERS[data.name]
    except KeyError:
        near = difflib.get_close_matches(data.name, _LOADERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"data.name={data.name!r} is unknown; {hint}known: {', '.join(_LOADERS)}"
        ) from None
    return loader(data)


def dataset_names() -> tuple[str, ...]:
    """The values that `data.name` may take."""
    return tuple(_LOADERS)


def _digits(data: DataConfig) -> ArrayDataset:
    """scikit-learn's 1,797 handwritten digits: 8x8 values 0..16, each pixel repeated."""
    from sklearn.datasets import load_digits

    size = data.image_size or 16
    if size % 8:
        raise ConfigError(
            f"data.image_size={size}: digits are 8x8 with repeated pixels, so the side must be "
            f"a multiple of 8; nearest: {max(8, 8 * round(size / 8))}"
        )
    bundle = load_digits()
    values = np.minimum(bundle.images.astype(np.int64) * 16, 255).astype(np.uint8)
    images = values.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    return ArrayDataset(
        name="digits",
        images=gray_to_rgb(images),
        labels=bundle.target.astype(np.int64),
        class_names=tuple(str(digit) for digit in range(10)),
        test_images=None,
        test_labels=None,
        mean=(0.3061, 0.3061, 0.3061),
        std=(0.3769, 0.3769, 0.3769),
        flip=False,
    )


def _own_images(data: DataConfig) -> ArrayDataset:
    from simpro_fast.data.datasets.image_list import load_own_images

    return load_own_images(data)


def _imagenet(data: DataConfig) -> ArrayDataset:
    from simpro_fast.data.datasets.imagenet import load_imagenet

    return load_imagenet(data)


_LOADERS: dict[str, Callable[[DataConfig], ArrayDataset]] = {
    "digits": _digits,
    "images": _own_images,
    "imagenet_127": _imagenet,
    "imagenet_1k": _imagenet,
    "fashion_mnist": load_fashion_mnist,
    "cifar10": load_cifar,
    "cifar100": load_cifar,
    "svhn": load_svhn,
    "stl10": load_stl10,
    "small_imagenet_127": load_small_imagenet_127,
    "small_imagenet_1k": load_small_imagenet_1k,
    "synthetic": load_synthetic,
}
