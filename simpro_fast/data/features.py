"""Cached features: what a frozen backbone sees of every image, in several views, in one folder.

features.json   what they are of, see `Description`
images.npy      float16 [N, 1 + weak + strong, D]: view 0 as evaluation sees the image, then weak,
                then strong views
unlabeled.npy   the same of unlabeled images that were published as a part of their own
test.npy        float16 [T, 1, D] of the test images, where they are a part of their own
damaged.json    rows of images that could not be read, with the reason; their features are zeros
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field, Strict
from torch import Tensor

from simpro_fast.data.batch import Batch, LoaderSettings, StepCounter, sent
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.sampling.draws import (
    Order,
    ShuffledOrder,
    Stream,
    below,
    positions_of,
    raw_words,
)
from simpro_fast.data.sampling.labeled_order import labeled_order
from simpro_fast.data.splits.split import Split, with_counts
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.file_schema import Count, FileSchema, read_as

DESCRIPTION, DAMAGED = "features.json", "damaged.json"
PARTS = ("images", "unlabeled", "test")
LENGTH = 10.0
"""Mean Euclidean norm of the features as a head sees them. Those of backbones go from 10 to 100,
and the learning rate that a linear head can take falls with the square of it; with this the rates
of the recipes for whole networks, 0.03 to 0.1, are right."""


class Description(FileSchema):
    """What cached features are of; a run that uses them must say the same."""

    format: int = 1
    model: str
    """`model.name` of the backbone."""
    weights: str
    """sha256 of its weights file."""
    data: str
    """`ArrayDataset.fingerprint`."""
    image_size: Count
    fit: str
    interpolation: str
    mean: list[float]
    std: list[float]
    views: dict[str, Any]
    """Keys of the section `data` that the views depend on."""
    seed: int
    weak: Count
    """Weak views of each image. strong: strong ones."""
    strong: Count
    features: Count
    """D."""
    length: float
    """Mean Euclidean norm of view 0."""

    def digest(self) -> str:
        """sha256 of all of it."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


Damaged = dict[str, dict[int, str]]
"""Part of `PARTS` to row to reason."""


Reasons = dict[Annotated[int, Strict(False)], str]


class _DamagedFile(FileSchema):
    images: Reasons = Field(default_factory=dict)
    unlabeled: Reasons = Field(default_factory=dict)
    test: Reasons = Field(default_factory=dict)


def read_damaged(folder: Path) -> Damaged:
    """Images without features. Raises UserError if the file that names them is damaged itself."""
    path = folder / DAMAGED
    return read_as(path, _DamagedFile).model_dump() if path.exists() else {}


@dataclass(frozen=True)
class Features:
    """An opened folder of cached features."""

    folder: Path
    description: Description
    arrays: dict[str, np.ndarray]
    """Memory-mapped; those of `PARTS` that the data set has."""
    damaged: Damaged

    @property
    def scale(self) -> float:
        """What features are multiplied with before the head; then they are `LENGTH` long."""
        return LENGTH / max(self.description.length, 1e-6)

    def usable(self, split: Split, dataset: ArrayDataset) -> Split:
        """The split without images that have no features."""
        rows = {part: np.array(list(found), np.int64) for part, found in self.damaged.items()}
        none = np.zeros(0, np.int64)
        own = rows.get("images", none)
        pool = own if dataset.unlabeled_images is None else rows.get("unlabeled", none)
        test = own if dataset.test_images is None else rows.get("test", none)
        if not any(map(len, (own, pool, test))):
            return split
        return with_counts(
            split.labeled[~np.isin(split.labeled, own)],
            split.unlabeled[~np.isin(split.unlabeled, pool)],
            split.test[~np.isin(split.test, test)],
            dataset,
            split.overlap,
        )

    def dataset(self, of: ArrayDataset) -> FeatureDataset:
        """The data set with view 0 in place of its images."""
        kept = {field.name: getattr(of, field.name) for field in fields(ArrayDataset)}
        kept["images"] = self.arrays["images"][:, 0]
        for part, name in (("test", "test_images"), ("unlabeled", "unlabeled_images")):
            if kept[name] is not None:
                kept[name] = self.arrays[part][:, 0]
        return FeatureDataset(**kept, source=of, features=self)


@dataclass(frozen=True, eq=False, kw_only=True)
class FeatureDataset(ArrayDataset):
    """A data set whose images are features float16 [n, D]."""

    source: ArrayDataset
    """The images that they are of."""
    features: Features

    @property
    def image_size(self) -> int:
        return self.source.image_size


def parts_of(dataset: ArrayDataset) -> dict[str, np.ndarray]:
    """The image arrays of a data set by the names of `PARTS`."""
    found = {
        "images": dataset.images,
        "unlabeled": dataset.unlabeled_images,
        "test": dataset.test_images,
    }
    return {part: images for part, images in found.items() if images is not None}


def open_features(folder: Path, expected: Description, dataset: ArrayDataset) -> Features:
    """Open what `simpro-fast embed` has written, and compare it with what a run is about.

    Args:
        expected: by the configuration; its numbers of views and D are not compared.

    Raises:
        UserError: the folder is damaged or unfinished.
        ConfigError: the features are of other weights, images or views.
    """
    found = read_as(folder / DESCRIPTION, Description)
    free = {"weak", "strong", "features", "length", "seed"}
    for key, value in expected.model_dump(exclude=free).items():
        if (theirs := getattr(found, key)) != value:
            raise ConfigError(
                f"train.features={folder}: made with another {key} ({str(theirs)[:60]}, here "
                f"{str(value)[:60]}); make them anew by simpro-fast embed, or undo the change"
            )
    arrays = {}
    for part, images in parts_of(dataset).items():
        path = folder / f"{part}.npy"
        try:
            # Copy on write: torch wants arrays that it could write.
            array = np.load(path, mmap_mode="c", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path} cannot be read ({error}); make it anew") from None
        views = 1 if part == "test" else 1 + found.weak + found.strong
        if array.dtype != np.float16 or array.shape != (len(images), views, found.features):
            raise UserError(
                f"{path} is {array.dtype} {list(array.shape)}, expected float16 "
                f"[{len(images)}, {views}, {found.features}]; make it anew by simpro-fast embed"
            )
        arrays[part] = array
    return Features(folder, found, arrays, read_damaged(folder))


class FeatureLoader:
    """Batches of cached views; built and used as the other loaders.

    Images are drawn as by them. Of each image one of its weak views is drawn, and V of its strong
    ones, different from each other: functions of seed, step and place in the global batch.
    """

    def __init__(self, settings: LoaderSettings, dataset: FeatureDataset, split: Split) -> None:
        described = dataset.features.description
        if settings.strong_views > described.strong:
            raise ConfigError(
                f"data.strong_views={settings.strong_views}, but {dataset.features.folder} has "
                f"{described.strong} of each image; embed with --strong {settings.strong_views}"
            )
        self._settings, self._dataset, self._split = settings, dataset, split
        self._weak, self._strong = described.weak, described.strong
        targets = split.targets(dataset)
        self._targets = targets
        self._orders: tuple[Order, Order] = (
            labeled_order(settings.data, targets, dataset.num_classes, settings.seed),
            ShuffledOrder(len(split.unlabeled), settings.seed, Stream.ORDER_UNLABELED),
        )
        arrays = dataset.features.arrays
        images = torch.from_numpy(arrays["images"]).to(settings.device)
        pool = images
        if "unlabeled" in arrays:
            pool = torch.from_numpy(arrays["unlabeled"]).to(settings.device)
        self._images, self._pool = images, pool
        self._counter = StepCounter(settings.start_step)

    def next(self, step: int) -> Batch:
        self._counter.take(step)
        settings, layout, device = self._settings, self._settings.layout, self._settings.device
        labeled, unlabeled = self._positions(step)
        blocks = []
        for view in self._views(step, "labeled", layout.labeled)[: layout.labeled_views]:
            blocks.append(self._labeled_features(labeled, view))
        rows = sent(self._split.unlabeled[unlabeled], device)
        for view in self._views(step, "unlabeled", layout.unlabeled):
            blocks.append(self._pool[rows, view])
        truth = self._dataset.unlabeled_truth(self._split.unlabeled[unlabeled])
        labels = self._targets[labeled], truth, labeled, unlabeled
        views = torch.cat(blocks).to(settings.dtype)
        return Batch(step, views, *(sent(array, device) for array in labels))

    def describe(self, step: int) -> dict[str, Any]:
        labeled, unlabeled = self._positions(step)
        sizes = {"labeled": len(labeled), "unlabeled": len(unlabeled)}
        return {
            "step": step,
            "labeled": self._split.labeled[labeled].tolist(),
            "unlabeled": self._split.unlabeled[unlabeled].tolist(),
            **{
                f"{kind}_views": [view.tolist() for view in self._views(step, kind, size)]
                for kind, size in sizes.items()
            },
        }

    def close(self) -> None:
        pass

    def _positions(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        return positions_of(self._settings, step, *self._orders)

    def _views(self, step: int, kind: str, count: int) -> list[Tensor]:
        """Of each image: its weak view, then its V strong ones (1 of labeled images); [count]."""
        settings, lane = self._settings, int(kind == "unlabeled")
        words = raw_words(
            settings.seed,
            Stream.CACHED_VIEW,
            step,
            start_block=settings.rank * count,
            count=4 * count,
            lane=lane,
        ).reshape(count, 4)
        words >>= np.uint64(32)
        found = [1 + below(words[:, 0], self._weak)]
        # Consecutive ones from a random place on, in a circle: all different, all equally likely.
        first = below(words[:, 1], self._strong)
        for view in range(settings.layout.strong_views if lane else 1):
            found.append(1 + self._weak + (first + view) % self._strong)
        return [sent(view, settings.device) for view in found]

    def _labeled_features(self, positions: np.ndarray, view: Tensor) -> Tensor:
        rows = sent(self._split.labeled[positions], view.device)
        own = len(self._split.own_labeled)
        if self._pool is self._images or own == len(self._split.labeled):
            return self._images[rows, view]
        # Unlabeled images that a method has labeled come from the other array.
        joined = sent(positions >= own, view.device)
        found = self._images[torch.where(joined, 0, rows), view]
        return torch.where(joined[:, None], self._pool[torch.where(joined, rows, 0), view], found)
