"""The index lists of an experiment, and their files `split.json` and `split.npz`."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from pydantic import model_validator

from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.utils.atomic_write import replacing, write_json
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import Count, FileSchema, read_as
from simpro_fast.utils.npz import read_npz

JSON_NAME = "split.json"
NPZ_NAME = "split.npz"
LISTS = ("labeled", "unlabeled", "test")


@dataclass(frozen=True, eq=False)
class PseudoLabeled:
    """Unlabeled images that a method has labeled and trains on as labeled ones."""

    positions: np.ndarray
    """int64 [P] in `Split.unlabeled`."""
    labels: np.ndarray
    """int64 [P], 0..K-1."""
    since: int
    """Step from which on they are labeled."""


@dataclass(frozen=True, eq=False)
class Split:
    """Dataset rows of one experiment; class-major and ascending unless they came from a file.

    A place in such a list is a labeled or an unlabeled position, see docs/architecture.md.
    """

    labeled: np.ndarray
    """int64 [N] dataset rows of `images`."""
    unlabeled: np.ndarray
    """int64 [M] dataset rows of `images`, or of `unlabeled_images` where the set has them."""
    test: np.ndarray
    """int64 [T] dataset rows of `test_images`, or of `images` where the set has no test part."""
    labeled_counts: tuple[int, ...]
    """Per class."""
    unlabeled_counts: tuple[int, ...] | None
    """Per class, None where the true labels are unknown; for reports, never for training."""
    test_counts: tuple[int, ...]
    """Per class."""
    overlap: bool
    """Whether the unlabeled set holds the labeled images as well."""
    pseudo_labeled: PseudoLabeled | None = None
    """The last P labeled images, which a method has taken out of the unlabeled list; None: none."""

    def targets(self, dataset: ArrayDataset) -> np.ndarray:
        """int64 [N] labels of the labeled images, for training."""
        found = dataset.labels[self.own_labeled]
        joined = self.pseudo_labeled
        return found if joined is None else np.concatenate([found, joined.labels])

    @property
    def own_labeled(self) -> np.ndarray:
        """int64 [N - P] dataset rows of the labeled images that came with their label."""
        joined = 0 if self.pseudo_labeled is None else len(self.pseudo_labeled.labels)
        return self.labeled[: len(self.labeled) - joined]

    def with_pseudo_labeled(self, joined: PseudoLabeled) -> Split:
        """This split with unlabeled images among the labeled ones, in place of earlier such.

        Raises:
            IndexError, ValueError: they are of other lists, or their labels of other classes.
        """
        classes = len(self.labeled_counts)
        if (
            len(joined.labels) != len(joined.positions)
            or ((joined.labels < 0) | (joined.labels >= classes)).any()
        ):
            raise ValueError(f"pseudo-labels that are none of the {classes} classes")
        labeled = np.concatenate([self.own_labeled, self.unlabeled[joined.positions]])
        return replace(self, labeled=labeled, pseudo_labeled=joined)

    def hash(self) -> str:
        """sha256 over the little-endian int64 lists labeled, unlabeled, test."""
        digest = hashlib.sha256()
        for dataset_rows in (self.labeled, self.unlabeled, self.test):
            digest.update(np.ascontiguousarray(dataset_rows, dtype="<i8").data)
        return digest.hexdigest()

    def summary(self) -> str:
        """One line for the log: sizes, whether the sets overlap, hash."""
        relation = "includes the labeled images" if self.overlap else "disjoint from labeled"
        return (
            f"split: {len(self.labeled)} labeled, {len(self.unlabeled)} unlabeled ({relation}), "
            f"{len(self.test)} test images, sha256 {self.hash()[:12]}"
        )


def with_counts(
    labeled_rows: np.ndarray,
    unlabeled_rows: np.ndarray,
    test_rows: np.ndarray,
    dataset: ArrayDataset,
    overlap: bool,
) -> Split:
    """The split of these dataset rows (int64, as in `Split`), with its images per class."""
    test_source = dataset.labels if dataset.test_labels is None else dataset.test_labels
    truth = dataset.unlabeled_truth(unlabeled_rows)
    return Split(
        labeled=labeled_rows,
        unlabeled=unlabeled_rows,
        test=test_rows,
        labeled_counts=_count(dataset.labels[labeled_rows], dataset.num_classes),
        unlabeled_counts=(None if (truth < 0).any() else _count(truth, dataset.num_classes)),
        test_counts=_count(test_source[test_rows], dataset.num_classes),
        overlap=overlap,
    )


def _count(labels: np.ndarray, num_classes: int) -> tuple[int, ...]:
    return tuple(np.bincount(labels, minlength=num_classes).tolist())


def save_split(split: Split, run_dir: Path, dataset: ArrayDataset) -> None:
    """Write `split.npz` (index lists) and `split.json` (counts, hash), each atomically."""
    arrays = {name: getattr(split, name).astype("<i8") for name in LISTS}
    description = {
        "dataset": dataset.name,
        "class_names": list(dataset.class_names),
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
    write_json(run_dir / JSON_NAME, description)


class SplitFile(FileSchema):
    """The content of `split.json`; counts are per class."""

    dataset: str | None
    class_names: list[str] | None
    num_labeled: Count
    num_unlabeled: Count
    num_test: Count
    labeled_counts: list[Count]
    unlabeled_counts: list[Count] | None
    test_counts: list[Count]
    overlap: bool
    hash: str

    @model_validator(mode="after")
    def _check(self) -> SplitFile:
        lists = [self.labeled_counts, self.test_counts, self.unlabeled_counts, self.class_names]
        if len({len(one) for one in lists if one is not None}) > 1 or not self.labeled_counts:
            raise ValueError("the lists must have a value for each class")
        if self.unlabeled_counts is not None and not any(self.unlabeled_counts):
            raise ValueError("unlabeled_counts must not all be 0")
        return self


def load_split(run_dir: Path) -> Split:
    """Read the split that `save_split` wrote.

    Raises:
        UserError: a file is missing or damaged, or the lists do not have the recorded hash.
    """
    told = read_as(run_dir / JSON_NAME, SplitFile)
    lists = read_lists(run_dir / NPZ_NAME, LISTS)
    split = Split(
        labeled=lists["labeled"],
        unlabeled=lists["unlabeled"],
        test=lists["test"],
        labeled_counts=tuple(told.labeled_counts),
        unlabeled_counts=None if told.unlabeled_counts is None else tuple(told.unlabeled_counts),
        test_counts=tuple(told.test_counts),
        overlap=told.overlap,
    )
    if split.hash() != told.hash:
        raise UserError(
            f"{run_dir / NPZ_NAME}: its lists have sha256 {split.hash()[:12]}, {JSON_NAME} "
            f"records {told.hash[:12]}; the two files do not belong together"
        )
    return split


def read_lists(path: Path, needed: Sequence[str] = LISTS[:2]) -> dict[str, np.ndarray]:
    """The int64 lists of an npz file; those in `needed` must be there."""
    try:
        lists = read_npz(path, LISTS)
    except FileNotFoundError:
        raise UserError(f"{path}: no such split file") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not an npz file of index lists ({error})") from None
    for name in needed:
        if name not in lists:
            raise UserError(f"{path}: has no list `{name}`")
    for name, indices in lists.items():
        if indices.ndim != 1 or (indices.dtype.kind not in "iu" and len(indices)):
            raise UserError(
                f"{path}: {name} is {indices.dtype} {list(indices.shape)}, expected a list of "
                "integers"
            )
    return {name: indices.astype(np.int64) for name, indices in lists.items()}
