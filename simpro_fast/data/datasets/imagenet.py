"""Full-resolution ImageNet-1k from its JPEG tree, with 1000 or 127 classes.

`data.root` holds `train/<wnid>/*.JPEG` and `val/<wnid>/*.JPEG`. Classes are numbered as in the
downsampled files (imagenet_classes.py), not alphabetically, so that head and tail are those of
small ImageNet; splits are cut from the training part as there, in the order of the file names.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.image_list import MEAN, STD, FileImages, ImageListDataset, with_sizes
from simpro_fast.data.datasets.imagenet_classes import ClassList, class_list, merged
from simpro_fast.data.files.manifest import Manifest, make_manifest, read_manifest
from simpro_fast.data.files.scan_folders import common_folder, scan_labeled
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.utils.errors import UserError

logger = logging.getLogger(__name__)

IMAGENET = ("imagenet_127", "imagenet_1k")
"""Values of `data.name` that are read from the tree."""
_SIDE = 224


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageNetTree(ImageListDataset):
    """`manifest` lists the training images, `val` those of the test part."""

    val: Manifest

    def fingerprint(self) -> str:
        """sha256 over both lists and the numbers of the classes."""
        digest = hashlib.sha256(f"{self.manifest.fingerprint()} {self.val.fingerprint()}".encode())
        digest.update(self.labels.astype("<i8").tobytes())
        return digest.hexdigest()


def list_tree(data: DataConfig) -> tuple[Manifest, Ignored]:
    """The files of `data.root/train` and `data.root/val`; labels are WordNet ids."""
    root = check_tree(data)
    ignored = Ignored()
    rows, classes = scan_labeled(root / "train", root / "val", ignored)
    return make_manifest(common_folder(root), rows, classes), ignored


def check_tree(data: DataConfig) -> Path:
    """The folder that holds `train/` and `val/`.

    Raises:
        UserError: one of them is missing.
    """
    root = data.root or Path("data/imagenet")
    for part in ("train", "val"):
        if not (root / part).is_dir():
            raise UserError(
                f"{data.name}: no folder {root / part}; set data.root to the folder that holds "
                "train/<wnid>/ and val/<wnid>/"
            )
    return root


def load_imagenet(data: DataConfig) -> ImageNetTree:
    """The tree, or the list of it that `prepare` made (`data.manifest`): with one, training need
    not open 1.3 million files to learn their sizes.

    Raises:
        UserError: a class folder is missing or unknown, or what `load_own_images` raises.
    """
    listed = class_list(data.class_list)
    if data.manifest is not None:
        manifest = read_manifest(data.manifest)
    else:
        manifest, ignored = list_tree(data)
        for line in ignored.lines():
            logger.info("ignored: %s", line)
    where = str(data.manifest or data.root or "data/imagenet")
    manifest = with_sizes(manifest.usable(), data)
    train, val = (
        replace(manifest, rows=tuple(row for row in manifest.rows if row.split == split))
        for split in ("labeled", "val")
    )
    labels, test_labels = (_numbers(part, listed, where) for part in (train, val))
    missing = np.flatnonzero(np.bincount(labels, minlength=len(listed.wnids)) == 0)
    if len(missing):
        raise UserError(
            f"{where}: no training image of {listed.wnids[missing[0]]} "
            f"({listed.names[missing[0]]}), {len(missing)} of {len(listed.wnids)} classes in all; "
            "unpack the whole training set"
        )
    names = listed.names
    if data.name == "imagenet_127":
        labels, test_labels, names = merged(labels, test_labels, listed, data.labeled_fraction)
    square = Square.configured(data, data.image_size or _SIDE, MEAN)
    images, test_images = (cast(np.ndarray, FileImages(part.rows, square)) for part in (train, val))
    return ImageNetTree(
        name=data.name,
        images=images,
        labels=labels,
        class_names=names,
        test_images=test_images,
        test_labels=test_labels,
        mean=MEAN,
        std=STD,
        flip=True,
        manifest=train,
        val=val,
    )


def _numbers(part: Manifest, listed: ClassList, where: str) -> np.ndarray:
    """int64 [n]: the row of each image's class in the list."""
    numbers = {wnid: k for k, wnid in enumerate(listed.wnids)}
    unknown = {row.label for row in part.rows} - numbers.keys()
    if unknown:
        raise UserError(f"{where}: {min(unknown)} is not among the 1000 classes of ImageNet-1k")
    return np.array([numbers[row.label] for row in part.rows], np.int64)
