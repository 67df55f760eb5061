"""Images with known classes for a trained network: folders, a manifest, a run's own test set."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

from simpro_fast.answers.evaluation import count_confusions
from simpro_fast.answers.model import TrainedModel
from simpro_fast.answers.predict import Unreadable, classify, item_pixels
from simpro_fast.answers.sources import Item
from simpro_fast.answers.unlabeled import square_of, unlabeled_set
from simpro_fast.data.datasets.image_list import FileImages
from simpro_fast.data.files.decode import OK, is_image_name
from simpro_fast.data.files.manifest import EVALUATED, Row, read_manifest
from simpro_fast.data.files.scan_folders import scan_classes
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.regular_file import no_file

T = TypeVar("T")
Progress = Callable[[int, int], None]


@dataclass
class LabeledLogits:
    """Plain logits of the images that could be read, with their classes."""

    logits: np.ndarray
    """float32 [n, K]."""
    targets: np.ndarray
    """int64 [n]."""
    unreadable: Unreadable = field(default_factory=Unreadable)
    notes: list[str] = field(default_factory=list)

    @property
    def confusion(self) -> np.ndarray:
        """int64 [K, K], rows true, columns predicted by the plain logits."""
        predicted = torch.from_numpy(self.logits.argmax(axis=1))
        classes = self.logits.shape[1]
        cells = torch.zeros(classes**2, dtype=torch.int64)
        count_confusions(cells, torch.from_numpy(self.targets), predicted, classes)
        return cells.view(classes, classes).numpy()


def labeled_logits(
    model: TrainedModel, data: Path, *, batch_size: int, threads: int, progress: Progress
) -> LabeledLogits:
    """Classify a folder with one subfolder per class (or labeled tar shards), or a manifest.

    The model's classes and their order count, whatever the folders are. Of a manifest, the rows of
    the splits val and test are taken, or where it has none, all rows with a class but unlabeled
    ones. All logits are held, 4 K bytes an image.

    Raises:
        ConfigError: a class that the model does not know; names it and the nearest. Or an image.
        UserError: nothing there, no image, none that can be read.
    """
    ignored = Ignored()
    if data.is_dir():
        rows, names = scan_classes(data, "val", ignored)
    elif said := no_file(data):
        raise UserError(f"{data}: {said}; give a folder with one subfolder per class or a manifest")
    elif is_image_name(data.name):
        raise ConfigError(
            f"{data}: is an image; give a folder with one subfolder of images per class, or a "
            "manifest (simpro-fast predict classifies images without classes)"
        )
    else:
        manifest = read_manifest(data)
        labeled = [row for row in manifest.rows if row.label and row.split != "unlabeled"]
        rows = [row for row in labeled if row.split in EVALUATED] or labeled
        names = sorted({row.label for row in rows})
    numbers = class_numbers(names, model.class_names, data)
    if not rows:
        left_out = "; ".join(ignored.lines())
        raise UserError(
            f"{data}: no image with a class{f' (ignored: {left_out})' if left_out else ''}; one "
            "subfolder per class is expected, or a manifest with the column label"
        )
    targets = np.array([numbers[row.label] for row in rows], np.int64)
    found = _classified(
        model,
        [_item(row) for row in rows],
        partial(item_pixels, square=model.file.square),
        targets,
        lambda item: item.path,
        batch_size=batch_size,
        threads=threads,
        progress=progress,
    )
    found.notes += [f"ignored: {line}" for line in ignored.lines()]
    return found


def _classified(
    model: TrainedModel,
    items: Sequence[T],
    pixels_of: Callable[[T], np.ndarray],
    targets: np.ndarray,
    name: Callable[[T], str],
    *,
    batch_size: int,
    threads: int,
    progress: Progress,
) -> LabeledLogits:
    """Classify items of known classes, int64 [n]. Raises `UserError` where none can be read."""
    logits = np.empty((len(items), len(model.class_names)), np.float32)
    unreadable, done, kept = Unreadable(), 0, np.zeros(len(items), bool)
    for chunk in classify(model, items, pixels_of, batch_size=batch_size, threads=threads):
        end = done + len(chunk.items)
        logits[done:end], kept[done:end] = chunk.logits, chunk.readable
        unreadable.add((name(item), status) for item, status in chunk.bad)
        done = end
        progress(done, len(items))
    if not kept.any():
        raise UserError(f"no image could be read (first: {unreadable.first})")
    return LabeledLogits(logits[kept], targets[kept], unreadable)


def _item(row: Row) -> Item:
    image, listed = row.image, (row.width, row.height) if row.width else None
    return Item(row.path, row.member, image if isinstance(image, Member) else row.path, OK, listed)


def run_test_logits(
    model: TrainedModel,
    run: Path,
    *,
    batch_size: int,
    threads: int,
    progress: Progress,
    trust_code: bool = False,
) -> LabeledLogits:
    """Classify the test set of the run that the model comes from; `trust_code` as `unlabeled_set`.

    Raises:
        UserError: not a run directory, another data set by now, or it has no test set.
    """
    folder = run if run.is_dir() else run.parent
    if not (folder / "config.yaml").is_file():
        raise UserError(
            f"{folder}: has no config.yaml, so its test set is not known; give DATA, a folder with "
            "one subfolder per class"
        )
    trained = unlabeled_set(folder, trust_code=trust_code)
    dataset, split = trained.dataset, trained.split
    if not len(split.test):
        raise UserError(f"{folder}: the run has no test set; give DATA, a folder of classes")
    images, labels = dataset.test_part
    return _classified(
        model,
        split.test.tolist(),
        partial(square_of, images),
        labels[split.test],
        lambda row: images.rows[row].path if isinstance(images, FileImages) else f"image {row}",
        batch_size=batch_size,
        threads=threads,
        progress=progress,
    )


def class_numbers(names: Sequence[str], class_names: Sequence[str], where: Path) -> dict[str, int]:
    """Names of folders to the model's numbers; Unicode compared in NFC, as macOS writes NFD.

    Raises:
        ConfigError: a name that is none of the model's.
    """
    known = {unicodedata.normalize("NFC", name): k for k, name in enumerate(class_names)}
    found = {name: known.get(unicodedata.normalize("NFC", name)) for name in names}
    unknown = [name for name in names if found[name] is None]
    if unknown:
        near = difflib.get_close_matches(unknown[0], class_names, n=1, cutoff=0.0)
        more = f", and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        raise ConfigError(
            f"{where}: class {unknown[0]!r}{more} is none of the model's {len(class_names)} "
            f"classes (nearest: {near[0]!r}); rename the folder, or leave it out"
        )
    return {name: number for name, number in found.items() if number is not None}
