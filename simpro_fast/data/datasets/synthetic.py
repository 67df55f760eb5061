"""`data.name: synthetic`: made-up images for benches and machine checks, no file needed.

Every class has a coarse colour pattern of its own under strong noise, so that a network learns
something and losses behave as on pictures; accuracies on it mean nothing.
"""

from __future__ import annotations

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.utils.errors import ConfigError

TEST_PER_CLASS = 10
_COARSE = 4
_KEY = 20_240_613


def load_synthetic(data: DataConfig) -> ArrayDataset:
    """`data.classes` classes of `labeled_max + unlabeled_max` images, always the same ones.

    Raises:
        ConfigError: `labeled_fraction` is set; the classes of this set have equal sizes.
    """
    if data.labeled_fraction is not None:
        raise ConfigError(
            "data.name=synthetic is cut by data.labeled_max and data.unlabeled_max; "
            "set data.labeled_fraction=null"
        )
    size, classes = data.image_size or 32, data.classes or 10
    bits = np.random.Philox(key=_KEY)

    def random_bytes(*shape: int) -> np.ndarray:
        count = int(np.prod(shape))
        return bits.random_raw(-(-count // 8)).view(np.uint8)[:count].reshape(shape)

    coarse = np.arange(size) * _COARSE // size
    patterns = random_bytes(classes, _COARSE, _COARSE, 3)[:, coarse][:, :, coarse] // 4 * 3

    def images_of(per_class: int) -> tuple[np.ndarray, np.ndarray]:
        images = random_bytes(classes, per_class, size, size, 3)
        images //= 4
        images += patterns[:, None]
        labels = np.repeat(np.arange(classes, dtype=np.int64), per_class)
        return images.reshape(-1, size, size, 3), labels

    images, labels = images_of(data.labeled_max + data.unlabeled_max)
    test_images, test_labels = images_of(TEST_PER_CLASS)
    return ArrayDataset(
        name="synthetic",
        images=images,
        labels=labels,
        class_names=tuple(f"class {k}" for k in range(classes)),
        test_images=test_images,
        test_labels=test_labels,
        mean=(0.5, 0.5, 0.5),
        std=(0.25, 0.25, 0.25),
        flip=True,
    )
