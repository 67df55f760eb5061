"""CIFAR-10 and CIFAR-100 from the published python archives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import (
    ArrayDataset,
    Stats,
    check_size,
    checked_labels,
    find_published,
    published_files,
    reading,
)
from simpro_fast.data.datasets.safe_pickle import entry, load_pickled_dict
from simpro_fast.utils.errors import UserError

_HOME = "https://www.cs.toronto.edu/~kriz/cifar.html (the python version)"


@dataclass(frozen=True)
class _Cifar:
    """Where the parts of a published python archive are."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels_key: str
    names_key: str
    num_classes: int
    mean: Stats
    std: Stats


_CIFAR = {
    "cifar10": _Cifar(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        meta="batches.meta",
        labels_key="labels",
        names_key="label_names",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2471, 0.2435, 0.2616),
    ),
    "cifar100": _Cifar(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        train=("train",),
        test="test",
        meta="meta",
        labels_key="fine_labels",
        names_key="fine_label_names",
        num_classes=100,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    ),
}


def load_cifar(data: DataConfig) -> ArrayDataset:
    """CIFAR-10 or CIFAR-100 from the published python archive, extracted or as tar.gz."""
    check_size(data, 32)
    layout = _CIFAR[data.name]
    source = find_published(data, layout.folder, layout.archive, layout.meta, _HOME)
    wanted = (*layout.train, layout.test, layout.meta)
    with reading(source):
        members = {
            name: load_pickled_dict(file, str(source / name))
            for name, file, _ in published_files(source, layout.folder, wanted)
        }
    meta = members[layout.meta]
    names = tuple(str(name) for name in entry(meta, layout.names_key, source / layout.meta))
    if len(names) != layout.num_classes:
        raise UserError(
            f"{source / layout.meta}: {len(names)} class names, expected {layout.num_classes}"
        )
    train = [_cifar_batch(members[name], layout, source / name) for name in layout.train]
    test_images, test_labels = _cifar_batch(members[layout.test], layout, source / layout.test)
    return ArrayDataset(
        name=data.name,
        images=np.concatenate([images for images, _ in train]),
        labels=np.concatenate([labels for _, labels in train]),
        class_names=names,
        test_images=test_images,
        test_labels=test_labels,
        mean=layout.mean,
        std=layout.std,
        flip=True,
    )


def _cifar_batch(
    content: dict[str, Any], layout: _Cifar, source: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 32, 32, 3] and labels int64 [n] of one pickled file."""
    planar = entry(content, "data", source)
    if (
        not isinstance(planar, np.ndarray)
        or planar.dtype != np.uint8
        or planar.ndim != 2
        or planar.shape[1] != 3072
    ):
        found = f"{planar.dtype} {list(planar.shape)}" if isinstance(planar, np.ndarray) else planar
        raise UserError(f"{source}: data is {found!s:.60}, expected uint8 [n, 3072]")
    images = np.ascontiguousarray(planar.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    labels = entry(content, layout.labels_key, source)
    return images, checked_labels(labels, len(images), layout.num_classes, str(source))
