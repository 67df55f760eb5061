"""Data sets by name, as arrays: uint8 images [N, H, W, 3], labels and class names."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset, checked_labels
from simpro_fast.data.datasets.cifar import load_cifar
from simpro_fast.data.datasets.digits import load_digits
from simpro_fast.data.datasets.fashion_mnist import load_fashion_mnist
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.datasets.imagenet import load_imagenet
from simpro_fast.data.datasets.small_imagenet import load_small_imagenet_1k, load_small_imagenet_127
from simpro_fast.data.datasets.stl10 import load_stl10
from simpro_fast.data.datasets.svhn import load_svhn
from simpro_fast.data.datasets.synthetic import load_synthetic
from simpro_fast.utils.dotted_path import import_function, is_dotted
from simpro_fast.utils.errors import ConfigError, UserError

DatasetLoader = Callable[[DataConfig], ArrayDataset]


def load_dataset(data: DataConfig) -> ArrayDataset:
    """Load the data set `data.name` from `data.root` or the place where it usually lies.

    Its mean, standard deviation, fit and interpolation are those of `data`, where that says them.

    Raises:
        ConfigError: unknown name, or an image size that the set does not have.
        UserError: files missing, damaged or of another format.
    """
    dataset = _loaded(data)
    return replace(
        dataset,
        mean=data.mean or dataset.mean,
        std=data.std or dataset.std,
        fit=data.fit,
        interpolation=data.interpolation or "bilinear",
    )


def dataset_loader(name: str) -> DatasetLoader:
    """The loader that `data.name: name` means.

    Raises:
        ConfigError: unknown name, or a dotted path that leads to no function.
    """
    loader = _SHIPPED.get(name) or _REGISTERED.get(name)
    if loader is None and is_dotted(name):
        loader = import_function("data.name", name)
    if loader is None:
        near = difflib.get_close_matches(name, dataset_names(), n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"data.name={name!r} is unknown; {hint}known: {', '.join(dataset_names())}, "
            "or package.module.function for a loader of your own"
        )
    return loader


def _loaded(data: DataConfig) -> ArrayDataset:
    loader = dataset_loader(data.name)
    if data.name in _SHIPPED:
        return loader(data)
    try:
        loaded = loader(data)
    except UserError:
        raise
    except Exception as error:  # whatever a stranger's function raises
        said = (str(error).splitlines() or ["no reason given"])[0]
        raise UserError(
            f"data.name={data.name}: the function failed ({type(error).__name__}: {said})"
        ) from error
    return _checked(loaded, f"data.name={data.name}")


def register_dataset(name: str, loader: DatasetLoader) -> None:
    """Let `data.name: name` stand for a data set of your own, in this process.

    A run that is started by a launcher names the loader by its dotted path instead, without
    registration: `data.name: my_package.my_module.my_loader`.

    Args:
        name: of no shipped set; a registered one is replaced.
        loader: from the section `data` (`root`, `image_size`, ... as the user set them; `mean`,
            `std` and `interpolation` else as `model.weights` expect) to an `ArrayDataset`. It must
            give the same images in the same order at every start.

    Raises:
        ValueError: the name belongs to a shipped set.
    """
    if name in _SHIPPED:
        raise ValueError(f"{name!r} is a shipped data set; choose another name")
    _REGISTERED[name] = loader


def dataset_names() -> tuple[str, ...]:
    """The values that `data.name` may take, besides dotted paths."""
    return (*_SHIPPED, *_REGISTERED)


def _checked(dataset: object, source: str) -> ArrayDataset:
    """Check what a stranger's loader gave; labels become int64.

    Raises:
        UserError: it is no data set that can be trained on; says why.
    """
    if not isinstance(dataset, ArrayDataset):
        raise UserError(
            f"{source}: the loader returned {type(dataset).__name__}, expected an ArrayDataset"
        )
    names = dataset.class_names
    if len(names) < 2 or len(set(names)) < len(names):
        raise UserError(f"{source}: class_names must be two or more different names")
    side = dataset.images.shape[1:2]
    for what in ("images", "test_images", "unlabeled_images"):
        images = getattr(dataset, what)
        if images is None:
            continue
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1:] != (*side, *side, 3):
            raise UserError(
                f"{source}: {what} must be squares of one size, uint8 [N, S, S, 3], got "
                f"{images.dtype} {list(images.shape)}"
            )
    for what in ("mean", "std"):
        values = getattr(dataset, what)
        if len(values) != 3 or (what == "std" and min(values) <= 0):
            raise UserError(f"{source}: {what} must be three numbers (std above 0), got {values}")
    if (dataset.test_images is None) != (dataset.test_labels is None):
        raise UserError(f"{source}: test_images and test_labels belong together; give both or none")
    test = None
    if dataset.test_images is not None:
        test = checked_labels(dataset.test_labels, len(dataset.test_images), len(names), source)
    labels = checked_labels(dataset.labels, len(dataset.images), len(names), source)
    return replace(dataset, labels=labels, test_labels=test)


_SHIPPED: dict[str, DatasetLoader] = {
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
_REGISTERED: dict[str, DatasetLoader] = {}
