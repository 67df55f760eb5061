"""scikit-learn's handwritten digits, which every installation has."""

from __future__ import annotations

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset, gray_to_rgb
from simpro_fast.utils.errors import ConfigError


def load_digits(data: DataConfig) -> ArrayDataset:
    """scikit-learn's 1,797 handwritten digits: 8x8 values 0..16, each pixel repeated.

    Their rows are in one fixed random order. scikit-learn's is by writers, so that labeled,
    unlabeled and test images, cut in this order, would be of different people.
    """
    size = data.image_size or 16
    if size % 8:
        raise ConfigError(
            f"data.image_size={size}: digits are 8x8 with repeated pixels, so the side must be "
            f"a multiple of 8; nearest: {max(8, 8 * round(size / 8))}"
        )
    from sklearn.datasets import load_digits as load_bundle  # takes a second

    bundle = load_bundle()
    # Raw words of a counter-based generator: the same with every version of NumPy.
    order = np.argsort(np.random.Philox(key=0).random_raw(len(bundle.target)))
    values = np.minimum(bundle.images[order].astype(np.int64) * 16, 255).astype(np.uint8)
    images = values.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    return ArrayDataset(
        name="digits",
        images=gray_to_rgb(images),
        labels=bundle.target[order].astype(np.int64),
        class_names=tuple(str(digit) for digit in range(10)),
        test_images=None,
        test_labels=None,
        mean=(0.3061, 0.3061, 0.3061),
        std=(0.3769, 0.3769, 0.3769),
        flip=False,
    )
