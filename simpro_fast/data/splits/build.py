"""Long-tailed splits by the rules of the released SimPro code.

Class counts follow an exponential law with truncation, and per class the first N_k images are
labeled and the next M_k unlabeled: in data set order, or in an order that `data.split_seed` draws.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.class_counts import wanted_counts
from simpro_fast.data.splits.listed import listed_split, split_from_file, test_part
from simpro_fast.data.splits.split import Split, with_counts
from simpro_fast.utils.errors import ConfigError


def make_split(data: DataConfig, dataset: ArrayDataset, seed: int) -> Split:
    """Cut the data set as the configuration says; a pure function of its arguments.

    Raises:
        ConfigError: a class has fewer images than asked, or would get none.
        UserError: `data.split_file` is unreadable or does not fit the data set.
    """
    if data.split_file is not None:
        return split_from_file(data, data.split_file, dataset)
    if data.name == "images":
        return listed_split(data, dataset)
    own_pool = dataset.unlabeled_images is not None
    if own_pool and data.overlap:
        raise ConfigError(
            f"data.overlap=true: {dataset.name} has an unlabeled part of its own, which does not "
            "hold the labeled images; leave it out"
        )
    rows_by_class = _rows_by_class(dataset.labels, dataset.num_classes, data.split_seed)
    held_out = _held_out(data, dataset, rows_by_class)
    rest = [own[: len(own) - len(held)] for own, held in zip(rows_by_class, held_out, strict=True)]
    labeled, unlabeled = wanted_counts(data, [len(own) for own in rest], dataset.class_names, seed)
    if own_pool:
        unlabeled = [0] * dataset.num_classes
    labeled_parts, unlabeled_parts = [], []
    for k, (n, m, own, held) in enumerate(zip(labeled, unlabeled, rest, held_out, strict=True)):
        if n + m > len(own):
            keys = ["total_max"] if data.total_max else ["labeled_max", "unlabeled_max"]
            keys = keys[:1] if own_pool else keys
            cure = " or ".join(f"data.{key}={getattr(data, key)}" for key in keys)
            kept = f" besides {len(held)} test images" if len(held) else ""
            raise ConfigError(
                f"class {k} ({dataset.class_names[k]}): {n} labeled + {m} unlabeled = {n + m} "
                f"images wanted, {len(own)} found{kept}; lower {cure}"
            )
        labeled_parts.append(own[:n])
        unlabeled_parts.append(own[: n + m] if data.overlap else own[n : n + m])
    if not data.allow_empty_classes:
        _refuse_empty("labeled", labeled, data, dataset)
        if not own_pool:
            _refuse_empty("unlabeled", unlabeled, data, dataset)
    return with_counts(
        np.concatenate(labeled_parts),
        np.arange(len(dataset.unlabeled_pool)) if own_pool else np.concatenate(unlabeled_parts),
        np.concatenate(held_out) if dataset.test_labels is None else test_part(data, dataset),
        dataset,
        data.overlap,
    )


def _rows_by_class(labels: np.ndarray, num_classes: int, seed: int | None) -> list[np.ndarray]:
    """Dataset rows of each class, int64: ascending, or in a random order."""
    if seed is None:
        order = np.argsort(labels, kind="stable").astype(np.int64)
    else:
        # Raw words of a counter-based generator: the same with every version of NumPy.
        tickets = np.random.Philox(key=seed).random_raw(len(labels))
        order = np.lexsort((tickets, labels)).astype(np.int64)
    borders = np.searchsorted(labels[order], np.arange(num_classes + 1))
    return [order[borders[k] : borders[k + 1]] for k in range(num_classes)]


def _held_out(
    data: DataConfig, dataset: ArrayDataset, rows_by_class: list[np.ndarray]
) -> list[np.ndarray]:
    """Dataset rows of the last `data.test_per_class` images of each class, for a set without a test
    part."""
    if dataset.test_labels is not None:
        return [dataset_rows[:0] for dataset_rows in rows_by_class]
    if data.test_per_class is None:
        raise ConfigError(
            f"{dataset.name} has no test part; set data.test_per_class, for example 40"
        )
    for k, dataset_rows in enumerate(rows_by_class):
        if len(dataset_rows) < data.test_per_class:
            raise ConfigError(
                f"class {k} ({dataset.class_names[k]}): {data.test_per_class} test images wanted, "
                f"{len(dataset_rows)} found; lower data.test_per_class"
            )
    return [own[len(own) - data.test_per_class :] for own in rows_by_class]


def _refuse_empty(
    part: str, counts: Sequence[int], data: DataConfig, dataset: ArrayDataset
) -> None:
    if 0 not in counts:
        return
    k = counts.index(0)
    if data.labeled_fraction is None:
        gamma = data.gamma_labeled
        if part == "unlabeled" and data.gamma_unlabeled is not None:
            gamma = data.gamma_unlabeled
        asked = f"data.{part}_max={getattr(data, f'{part}_max')} with gamma {gamma:g}"
        cure = f"data.{part}_max >= {int(np.ceil(gamma))}, a smaller gamma"
    else:
        total = "" if data.total_max is None else f" of data.total_max={data.total_max}"
        asked = f"data.labeled_fraction={data.labeled_fraction:g}{total}"
        cure = "another fraction or more images"
    raise ConfigError(
        f"{asked} leaves no {part} image for class {k} ({dataset.class_names[k]}), "
        f"{counts.count(0)} of {len(counts)} classes in all; use {cure}, or "
        "data.allow_empty_classes=true"
    )
