"""Data sets by name, as arrays: uint8 images [N, H, W, 3], labels and class names."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.cifar import load_cifar
from simpro_fast.data.datasets.digits import load_digits
from simpro_fast.data.datasets.fashion_mnist import load_fashion_mnist
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.datasets.imagenet import load_imagenet
from simpro_fast.data.datasets.small_imagenet import load_small_imagenet_1k, load_small_imagenet_127
from simpro_fast.data.datasets.stl10 import load_stl10
from simpro_fast.data.datasets.svhn import load_svhn
from simpro_fast.data.datasets.synthetic import load_synthetic
from simpro_fast.errors import ConfigError


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


_LOADERS: dict[str, Callable[[DataConfig], ArrayDataset]] = {
    "digits": load_digits,
    "images": load_own_images,
    "imagenet_127": load_imagenet,
    "imagenet_1k": load_imagenet,
    "fashion_mnist": load_fashion_mnist,
    "cifar10": load_cifar,
    "cifar100": load_cifar,
    "svhn": load_svhn,
    "stl10": load_stl10,
    "small_imagenet_127": load_small_imagenet_127,
    "small_imagenet_1k": load_small_imagenet_1k,
    "synthetic": load_synthetic,
}
