"""Splits that are given, not drawn: by a file of dataset rows, or by the folders of own images."""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import ImageListDataset
from simpro_fast.data.files.decode import encoded_bytes
from simpro_fast.data.files.manifest import Row
from simpro_fast.data.splits.split import LISTS, Split, read_lists, with_counts
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.logs import FOUND_BY_ALL

logger = logging.getLogger(__name__)


def listed_split(data: DataConfig, dataset: ArrayDataset) -> Split:
    """Dataset rows as the files are sorted into folders; without val, some labeled ones held out.

    The held-out images are the first of each class in the order of a hash of their names and of
    `data.split_seed`: the same whatever the run's seed and wherever the files lie, and not simply
    the oldest or the newest.
    """
    assert isinstance(dataset, ImageListDataset)
    rows, labels = dataset.manifest.rows, dataset.labels
    parts = {
        split: np.array([i for i, row in enumerate(rows) if row.split == split], np.int64)
        for split in ("labeled", "unlabeled", "val", "test")
    }
    labeled = parts["labeled"][np.argsort(labels[parts["labeled"]], kind="stable")]
    test = parts["val"] if len(parts["val"]) else parts["test"]
    if data.holdout_per_class:
        if len(test):
            raise ConfigError(
                f"data.holdout_per_class={data.holdout_per_class}: there are {len(test)} val "
                "images already; leave it out"
            )
        labeled, test = _hold_out(data, dataset, labeled)
    unlabeled = parts["unlabeled"]
    if data.overlap:
        unlabeled = np.concatenate([labeled, np.setdiff1d(unlabeled, labeled)])
    return with_counts(labeled, unlabeled, test, dataset, data.overlap)


def _hold_out(
    data: DataConfig, dataset: ImageListDataset, labeled_rows: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Dataset rows (kept, held out); no content is in both: copies of held-out images go.

    One image of each class always stays labeled.
    """
    kept, held, untested = [], [], []
    salt = "" if data.split_seed is None else f"{data.split_seed}/"
    rows = dataset.manifest.rows

    def order(i: int) -> tuple[bytes, str, str]:
        name = os.path.basename(rows[i].member or rows[i].path)
        digest = hashlib.sha256(os.fsencode(f"{salt}{rows[i].label}/{name}")).digest()
        return digest, rows[i].path, rows[i].member

    for k, name in enumerate(dataset.class_names):
        members = sorted(labeled_rows[dataset.labels[labeled_rows] == k], key=order)
        contents = _contents([rows[i] for i in members])
        firsts = dict(zip(reversed(contents), reversed(members), strict=True))
        distinct = list(dict.fromkeys(contents))
        chosen = set(distinct[: min(data.holdout_per_class, max(0, len(distinct) - 1))])
        if not chosen:
            untested.append(name)
        held.append(np.sort(np.array([firsts[content] for content in chosen], np.int64)))
        rest = [i for i, content in zip(members, contents, strict=True) if content not in chosen]
        kept.append(np.sort(np.array(rest, np.int64)))
    if untested:
        logger.warning(
            "data.holdout_per_class: no test image for %s, of which there is one labeled image at "
            "most; accuracies leave them out",
            ", ".join(map(repr, untested)),
            extra=FOUND_BY_ALL,
        )
    return np.concatenate(kept), np.concatenate(held)


def _contents(rows: Sequence[Row]) -> list[str]:
    """Return keys that are equal for images of equal content.

    Without a list by `prepare`, files are read as far as others have their length.
    """
    lengths = Counter(row.bytes for row in rows)
    try:
        return [
            row.sha256
            or (
                hashlib.sha256(encoded_bytes(row.image)).hexdigest()
                if lengths[row.bytes] > 1
                else f"of {row.bytes} bytes"
            )
            for row in rows
        ]
    except OSError as error:
        raise UserError(f"{error.filename}: unreadable: {error.strerror}") from None


def split_from_file(data: DataConfig, path: Path, dataset: ArrayDataset) -> Split:
    """Take dataset rows chosen elsewhere; without a list `test`, all of the set's test part."""
    sizes = {name: len(dataset.labels) for name in LISTS}
    sizes["unlabeled"] = len(dataset.unlabeled_pool)
    if dataset.test_labels is not None:
        sizes["test"] = len(dataset.test_labels)
    lists = read_lists(path)
    if "test" not in lists:
        if dataset.test_labels is None:
            raise UserError(f"{path}: needs a list `test`, since {dataset.name} has no test part")
        lists["test"] = test_part(data, dataset)
    labeled, unlabeled, test = (lists[name] for name in LISTS)
    for name in LISTS:
        indices = lists[name]
        if len(indices) and not (indices.min() >= 0 and indices.max() < sizes[name]):
            raise UserError(
                f"{path}: {name} goes from {indices.min()} to {indices.max()}, but "
                f"{dataset.name} has {sizes[name]} images there"
            )
        values, counts = np.unique(indices, return_counts=True)
        if len(values) < len(indices):
            raise UserError(f"{path}: {name} holds image {values[counts > 1][0]} more than once")
    if not len(labeled) or not len(unlabeled):
        raise UserError(f"{path}: labeled and unlabeled need at least one image each")
    if not data.overlap and dataset.unlabeled_images is None:
        _refuse_shared(path, labeled, unlabeled, "labeled and unlabeled", "data.overlap=true")
    if dataset.test_labels is None:
        for name in ("labeled", "unlabeled"):
            _refuse_shared(path, lists[name], test, f"{name} and test", "another list")
    same_pool = dataset.unlabeled_images is None
    overlap = same_pool and len(np.intersect1d(labeled, unlabeled)) > 0
    split = with_counts(labeled, unlabeled, test, dataset, overlap)
    if 0 in split.labeled_counts and not data.allow_empty_classes:
        k = split.labeled_counts.index(0)
        raise UserError(
            f"{path}: no labeled image of class {k} ({dataset.class_names[k]}); add some or set "
            "data.allow_empty_classes=true"
        )
    return split


def _refuse_shared(
    path: Path, dataset_rows: np.ndarray, others: np.ndarray, names: str, cure: str
) -> None:
    shared = np.intersect1d(dataset_rows, others)
    if len(shared):
        raise UserError(
            f"{path}: {names} share {len(shared)} images (first: {shared[0]}); use {cure}"
        )


def test_part(data: DataConfig, dataset: ArrayDataset) -> np.ndarray:
    """Dataset rows of the test part, int64, ascending: all, or `data.test_per_class` of each class.

    Which ones is decided by a fixed sequence, so that runs of all seeds are tested alike.
    """
    labels = dataset.test_labels
    assert labels is not None
    if data.test_per_class is None:
        return np.arange(len(labels))
    tickets = np.random.Philox(key=0).random_raw(len(labels))
    drawn = np.lexsort((tickets, labels))
    counts = np.bincount(labels, minlength=dataset.num_classes)
    rank = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.sort(drawn[rank < data.test_per_class])
