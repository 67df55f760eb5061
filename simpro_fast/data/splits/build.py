"""Long-tailed splits: class counts, index lists, and their files `split.json` and `split.npz`.

The rules are those of the released SimPro code: counts by an exponential law with truncation,
and per class, in data set order, the first N_k images labeled and the next M_k unlabeled.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.registry import ArrayDataset
from simpro_fast.data.splits.class_counts import wanted_counts
from simpro_fast.errors import ConfigError, UserError
from simpro_fast.utils.atomic_write import replacing

JSON_NAME = "split.json"
NPZ_NAME = "split.npz"
_LISTS = ("labeled", "unlabeled", "test")


@dataclass(frozen=True, eq=False)
class Split:
    """Index lists of one experiment; class-major and ascending unless they came from a file."""

    labeled: np.ndarray
    """int64 [N] into the data set's `images`."""
    unlabeled: np.ndarray
    """int64 [M] into `images`, or into `unlabeled_images` where the set has such a part."""
    test: np.ndarray
    """int64 [T] into `test_images`, or into `images` where the set has no test part."""
    labeled_counts: tuple[int, ...]
    """Per class."""
    unlabeled_counts: tuple[int, ...] | None
    """Per class, None where the true labels are unknown; for reports, never for training."""
    test_counts: tuple[int, ...]
    """Per class."""
    overlap: bool
    """Whether the unlabeled set holds the labeled images as well."""

    def hash(self) -> str:
        """sha256 over the little-endian int64 lists labeled, unlabeled, test."""
        digest = hashlib.sha256()
        for indices in (self.labeled, self.unlabeled, self.test):
            digest.update(np.ascontiguousarray(indices, dtype="<i8").data)
        return digest.hexdigest()

    def summary(self) -> str:
        """One line for the log: sizes, whether the sets overlap, hash."""
        relation = "includes the labeled images" if self.overlap else "disjoint from labeled"
        return (
            f"split: {len(self.labeled)} labeled, {len(self.unlabeled)} unlabeled ({relation}), "
            f"{len(self.test)} test images, sha256 {self.hash()[:12]}"
        )


def make_split(data: DataConfig, dataset: ArrayDataset, seed: int) -> Split:
    """Cut the data set as the configuration says; a pure function of its arguments.

    Raises:
        ConfigError: a class has fewer images than asked, or would get none.
        UserError: `data.split_file` is unreadable or does not fit the data set.
    """
    if data.split_file is not None:
        return _split_from_file(data, data.split_file, dataset)
    if data.name == "images":
        from simpro_fast.data.datasets.image_list import own_split

        return own_split(data, dataset)
    own_pool = dataset.unlabeled_images is not None
    if own_pool and data.overlap:
        raise ConfigError(
            f"data.overlap=true: {dataset.name} has an unlabeled part of its own, which does not "
            "hold the labeled images; leave it out"
        )
    by_class = _indices_by_class(dataset.labels, dataset.num_classes)
    held_out = _held_out(data, dataset, by_class)
    rest = [own[: len(own) - len(held)] for own, held in zip(by_class, held_out, strict=True)]
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
    return _with_counts(
        np.concatenate(labeled_parts),
        np.arange(len(dataset.unlabeled_pool)) if own_pool else np.concatenate(unlabeled_parts),
        np.concatenate(held_out) if dataset.test_labels is None else _test_part(data, dataset),
        dataset,
        data.overlap,
    )


def save_split(split: Split, run_dir: Path, dataset: ArrayDataset | None = None) -> None:
    """Write `split.npz` (index lists) and `split.json` (counts, hash), each atomically.

    Args:
        split: the split.
        run_dir: existing folder.
        dataset: if given, its name and class names go into the JSON file.
    """
    arrays = {name: getattr(split, name).astype("<i8") for name in _LISTS}
    description = {
        "dataset": dataset.name if dataset else None,
        "class_names": list(dataset.class_names) if dataset else None,
        "num_labeled": len(split.labeled),
        "num_unlabeled": len(split.unlabeled),
        "num_test": len(split.test),
        "labeled_counts": list(split.labeled_counts),
        "unlabeled_counts": None if split.unlabeled_counts is None else [*split.unlabeled_counts],
        "test_counts": list(split.test_counts),
        "overlap": split.overlap,
        "hash": split.hash(),
    }
    with replacing(run_dir / NPZ_NAME) as file:
        np.savez(file, **arrays)
    with replacing(run_dir / JSON_NAME) as file:
        file.write((json.dumps(description, indent=1) + "\n").encode())


def load_split(run_dir: Path) -> Split:
    """Read the split that `save_split` wrote.

    Raises:
        UserError: a file is missing or damaged, or the lists do not have the recorded hash.
    """
    path = run_dir / JSON_NAME
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
        truth = described["unlabeled_counts"]
        lists = _read_lists(run_dir / NPZ_NAME)
        split = Split(
            labeled=lists["labeled"],
            unlabeled=lists["unlabeled"],
            test=lists["test"],
            labeled_counts=tuple(described["labeled_counts"]),
            unlabeled_counts=None if truth is None else tuple(truth),
            test_counts=tuple(described["test_counts"]),
            overlap=described["overlap"],
        )
        recorded = described["hash"]
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError(f"{path}: damaged ({type(error).__name__}: {error})") from None
    if split.hash() != recorded:
        raise UserError(
            f"{run_dir / NPZ_NAME}: its lists have sha256 {split.hash()[:12]}, {JSON_NAME} "
            f"records {recorded[:12]}; the two files do not belong together"
        )
    return split


def _indices_by_class(labels: np.ndarray, num_classes: int) -> list[np.ndarray]:
    """Ascending positions of each class."""
    order = np.argsort(labels, kind="stable").astype(np.int64)
    borders = np.searchsorted(labels[order], np.arange(num_classes + 1))
    return [order[borders[k] : borders[k + 1]] for k in range(num_classes)]


def _held_out(
    data: DataConfig, dataset: ArrayDataset, by_class: list[np.ndarray]
) -> list[np.ndarray]:
    """The last `data.test_per_class` images of each class, of a set without a test part."""
    if dataset.test_labels is not None:
        return [indices[:0] for indices in by_class]
    if data.test_per_class is None:
        raise ConfigError(
            f"{dataset.name} has no test part; set data.test_per_class, for example 40"
        )
    for k, indices in enumerate(by_class):
        if len(indices) < data.test_per_class:
            raise ConfigError(
                f"class {k} ({dataset.class_names[k]}): {data.test_per_class} test images wanted, "
                f"{len(indices)} found; lower data.test_per_class"
            )
    return [indices[len(indices) - data.test_per_class :] for indices in by_class]


def _test_part(data: DataConfig, dataset: ArrayDataset) -> np.ndarray:
    """The set's test images, ascending: all, or `data.test_per_class` of each class.

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


def _with_counts(
    labeled: np.ndarray,
    unlabeled: np.ndarray,
    test: np.ndarray,
    dataset: ArrayDataset,
    overlap: bool,
) -> Split:
    test_source = dataset.labels if dataset.test_labels is None else dataset.test_labels
    truth = dataset.unlabeled_truth(unlabeled)
    return Split(
        labeled=labeled,
        unlabeled=unlabeled,
        test=test,
        labeled_counts=_count(dataset.labels[labeled], dataset.num_classes),
        unlabeled_counts=(None if (truth < 0).any() else _count(truth, dataset.num_classes)),
        test_counts=_count(test_source[test], dataset.num_classes),
        overlap=overlap,
    )


def _count(labels: np.ndarray, num_classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


def _split_from_file(data: DataConfig, path: Path, dataset: ArrayDataset) -> Split:
    """Take index lists made elsewhere; without a list `test`, all of the set's test part."""
    lists = _read_lists(path)
    if "test" not in lists:
        if dataset.test_labels is None:
            raise UserError(f"{path}: needs a list `test`, since {dataset.name} has no test part")
        lists["test"] = _test_part(data, dataset)
    labeled, unlabeled, test = (lists[name] for name in _LISTS)
    sizes = {name: len(dataset.labels) for name in _LISTS}
    sizes["unlabeled"] = len(dataset.unlabeled_pool)
    if dataset.test_labels is not None:
        sizes["test"] = len(dataset.test_labels)
    for name in _LISTS:
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
    split = _with_counts(labeled, unlabeled, test, dataset, overlap)
    if 0 in split.labeled_counts and not data.allow_empty_classes:
        k = split.labeled_counts.index(0)
        raise UserError(
            f"{path}: no labeled image of class {k} ({dataset.class_names[k]}); add some or set "
            "data.allow_empty_classes=true"
        )
    return split


def _refuse_shared(path: Path, a: np.ndarray, b: np.ndarray, names: str, cure: str) -> None:
    shared = np.intersect1d(a, b)
    if len(shared):
        raise UserError(
            f"{path}: {names} share {len(shared)} images (first: {shared[0]}); use {cure}"
        )


_BROKEN_FILE = (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error)


def _read_lists(path: Path) -> dict[str, np.ndarray]:
    """The int64 lists of an npz file; nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            lists = {name: np.asarray(file[name]) for name in _LISTS if name in file}
    except FileNotFoundError:
        raise UserError(f"{path}: no such split file") from None
    except (*_BROKEN_FILE, TypeError, AttributeError) as error:
        raise UserError(
            f"{path}: not an npz file of index lists ({type(error).__name__})"
        ) from None
    for name in ("labeled", "unlabeled"):
        if name not in lists:
            raise UserError(f"{path}: has no list `{name}`")
    for name, indices in lists.items():
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and len(indices)):
            raise UserError(
                f"{path}: {name} is {indices.dtype} {list(indices.shape)}, expected a list of "
                "integers"
            )
    return {name: indices.astype(np.int64) for name, indices in lists.items()}
