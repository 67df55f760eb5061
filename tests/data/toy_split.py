"""A tiny data set and its configuration, for the tests of splits."""

from __future__ import annotations

from typing import Any

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset


def make_dataset(class_sizes: list[int], test_sizes: list[int] | None = None) -> ArrayDataset:
    """1x1 images with interleaved classes, each image's red value its class."""
    labels = np.repeat(np.arange(len(class_sizes)), class_sizes)
    labels = np.random.default_rng(0).permutation(labels).astype(np.int64)
    test = None if test_sizes is None else np.repeat(np.arange(len(test_sizes)), test_sizes)
    return ArrayDataset(
        name="toy",
        images=np.broadcast_to(labels[:, None, None, None], (len(labels), 1, 1, 3)).astype(
            np.uint8
        ),
        labels=labels,
        class_names=tuple(f"name{k}" for k in range(len(class_sizes))),
        test_images=None if test is None else np.zeros((len(test), 1, 1, 3), np.uint8),
        test_labels=None if test is None else test.astype(np.int64),
        mean=(0.5, 0.5, 0.5),
        std=(0.2, 0.2, 0.2),
        flip=True,
    )


def config(**values: Any) -> DataConfig:
    defaults: dict[str, Any] = {
        "name": "toy",
        "labeled_max": 4,
        "unlabeled_max": 8,
        "gamma_labeled": 2.0,
    }
    return DataConfig(**(defaults | values))
