"""A user's own images as a data set: `data.name: images`.

Pictures stay in their files (or in the packed array); what is held in memory is the list. Rows of
the list are the dataset rows, so that splits, draws and reports work as for arrays.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import cast

import numpy as np

from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.base import ArrayDataset, Rows
from simpro_fast.data.files.decode import (
    CHANGED,
    OK,
    UNSUPPORTED,
    Facts,
    ImageSource,
    is_heif_name,
    read_header,
    size_status,
)
from simpro_fast.data.files.manifest import EVALUATED, Manifest, Row, read_manifest
from simpro_fast.data.files.packed import open_packed
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.files.square import row_square
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.logs import FOUND_BY_ALL
from simpro_fast.utils.machine import cpu_cores
from simpro_fast.utils.names import hint
from simpro_fast.utils.parallel_map import in_order
from simpro_fast.utils.regular_file import check_regular

logger = logging.getLogger(__name__)

# Of the ImageNet training set, what pretrained networks expect.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_KEPT_BYTES = 1 << 30


class FileImages:
    """Image files behind the few operations of an array that evaluation and reports use.

    An index gives uint8 [n, size, size, 3]: the square of each file (crops.py), decoded in threads
    when asked for. Up to 1 GiB of decoded squares is kept, so that a test set is usually decoded
    once. `rows` are those of a manifest; members of shards are files here.
    """

    dtype = np.dtype(np.uint8)
    ndim = 4

    def __init__(
        self,
        rows: Sequence[Row],
        square: Square,
        kept: dict[ImageSource, np.ndarray] | None = None,
    ) -> None:
        self.rows, self.square = tuple(rows), square
        self.shape = (len(self.rows), square.size, square.size, 3)
        self._kept = {} if kept is None else kept

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> np.ndarray:
        chosen = self.subset(np.arange(len(self))[index]).rows
        files, size = [row.image for row in chosen], self.shape[1]
        rows = dict(zip(files, chosen, strict=True))
        missing = [file for file in rows if file not in self._kept]
        fresh = {}
        decoded = in_order(lambda file: row_square(rows[file], self.square), missing, cpu_cores())
        for file, pixels in zip(missing, decoded, strict=True):
            fresh[file] = pixels
            if (len(self._kept) + 1) * size * size * 3 <= _KEPT_BYTES:
                self._kept[file] = pixels
        out = np.empty((len(files), size, size, 3), np.uint8)
        for place, file in enumerate(files):
            out[place] = fresh[file] if file in fresh else self._kept[file]
        return out

    def subset(self, dataset_rows: np.ndarray) -> FileImages:
        """Some of the files; nothing is decoded."""
        return FileImages([self.rows[i] for i in dataset_rows], self.square, self._kept)


def select(images: np.ndarray, dataset_rows: np.ndarray) -> np.ndarray:
    """`images[dataset_rows]`, without decoding or copying them all at once."""
    if isinstance(images, FileImages):
        return cast(np.ndarray, images.subset(dataset_rows))
    return cast(np.ndarray, Rows(images, dataset_rows))


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageListDataset(ArrayDataset):
    """One row per usable image; `images` is a `FileImages` or the packed array.

    With a test part of its own (ImageNet), the rows are those of `images` alone.
    """

    manifest: Manifest
    """Usable rows, with sizes."""

    def fingerprint(self) -> str:
        """sha256 over the list of images, their sizes and, where known, their contents."""
        return self.manifest.fingerprint()

    def files_state(self) -> str:
        """sha256 over sizes and modification times of the files whose content nobody has hashed."""
        if not self.in_files:
            return "packed"
        unknown = dict.fromkeys(row.path for row in self.manifest.rows if not row.sha256)
        stats = [os.stat(path) for path in unknown]
        times = [f"{stat.st_size} {stat.st_mtime_ns}" for stat in stats]
        return hashlib.sha256("\n".join(times).encode()).hexdigest()

    @property
    def in_files(self) -> bool:
        return isinstance(self.images, FileImages)


def load_own_images(data: DataConfig) -> ImageListDataset:
    """The list of images that `data.manifest`, or the three folders, stand for.

    Raises:
        ConfigError: no image size, or a class without a labeled image.
        UserError: what `scan_folders` and `read_manifest` raise; a file that is gone, has changed
            since `prepare`; one that `prepare` has not seen and that cannot be used (left out
            with on_bad_image=skip); an image that is both trained on and tested on.
    """
    manifest = _listed(data)
    if data.packed is not None:
        images = open_packed(data.packed, manifest, data, MEAN)
        manifest = manifest.usable()
    else:
        if data.image_size is None:
            raise ConfigError("own images have many sizes; set data.image_size, for example 32")
        manifest = with_sizes(manifest.usable(), data)
        square = Square.configured(data, data.image_size, MEAN)
        images = cast(np.ndarray, FileImages(manifest.rows, square))
    _refuse_leaks(manifest)
    numbers = {name: k for k, name in enumerate(manifest.class_names)}
    labels = np.array([numbers.get(row.label, -1) for row in manifest.rows], np.int64)
    _check_classes(data, manifest, labels)
    return ImageListDataset(
        name="images",
        images=images,
        labels=labels,
        class_names=manifest.class_names,
        test_images=None,
        test_labels=None,
        mean=MEAN,
        std=STD,
        flip=True,
        manifest=manifest,
    )


def _listed(data: DataConfig) -> Manifest:
    if data.manifest is not None:
        return read_manifest(data.manifest)
    assert data.labeled is not None  # checked by the configuration
    manifest, ignored = scan_folders(data.labeled, data.unlabeled, data.val)
    for line in ignored.lines():
        logger.info("ignored: %s", line)
    for line in ignored.notes:
        logger.info("note: %s", line)
    return manifest


def with_sizes(manifest: Manifest, data: DataConfig) -> Manifest:
    """Compare files with the list, and read the sizes that it lacks from their headers.

    Raises:
        UserError: a listed file is gone or has changed, or, unless on_bad_image=skip leaves it out,
            one that `prepare` has not seen cannot be read or is no image of a kind that is read.
    """

    def look(row: Row) -> Facts:
        image = row.image
        if not row.sha256 or is_heif_name(str(image)):  # which only packing can have taken
            facts = read_header(image, data.max_megapixels)
        else:
            try:
                length = row.bytes
                if isinstance(image, Member):
                    image.verify()
                else:
                    length = check_regular(image).st_size
            except OSError as error:
                return Facts(status=f"unreadable: {error.strerror}")
            facts = Facts(row.width, row.height, length)
        status = size_status(facts, (row.width or facts.width, row.height or facts.height))
        if status == OK and row.bytes not in (0, facts.bytes):
            status = f"{CHANGED}: {facts.bytes} bytes, {row.bytes} listed"
        return replace(facts, status=status)

    rows, refused = [], []
    for row, facts in zip(manifest.rows, in_order(look, manifest.rows, cpu_cores()), strict=True):
        now = replace(row, width=facts.width, height=facts.height, bytes=facts.bytes)
        if facts.status == OK:
            rows.append(now)
        elif (
            data.on_bad_image == "skip" and not row.sha256 and not facts.status.startswith(CHANGED)
        ):
            refused.append(f"{row.image}: {facts.status}")
        else:
            # What is of a kind that is not read says its cure; anything else was whole before.
            restore = "" if facts.status.startswith(UNSUPPORTED) else "restore it, "
            skip = "" if row.sha256 else "set data.on_bad_image=skip, "
            raise UserError(
                f"{row.image}: {facts.status}; {restore}{skip}or run simpro-fast prepare on the set"
            )
    for line in refused:
        logger.warning("left out: %s", line, extra=FOUND_BY_ALL)
    if refused:
        logger.warning(
            "left out: %d of %d images in all",
            len(refused),
            len(manifest.rows),
            extra=FOUND_BY_ALL,
        )
    return replace(manifest, rows=tuple(rows))


def _refuse_leaks(manifest: Manifest) -> None:
    """Refuse test images among the others, by place, and by content where that is known."""
    folder = cache(os.path.realpath)

    def keys(row: Row) -> Iterator[Hashable]:
        parent, name = os.path.split(row.path)
        yield folder(parent), name, row.member, row.offset
        if row.sha256:
            yield row.sha256

    tested = {key: row for row in manifest.rows if row.split in EVALUATED for key in keys(row)}
    for row in manifest.rows if tested else ():
        leak = next((tested[key] for key in keys(row) if key in tested), None)
        if leak is not None and row.split not in EVALUATED:
            raise UserError(
                f"{leak.image}: the {leak.split} image is among the {row.split} ones, too "
                f"({row.image}); test on images that are not trained on"
            )


def _check_classes(data: DataConfig, manifest: Manifest, labels: np.ndarray) -> None:
    names = manifest.class_names
    if len(names) < 2:
        found = f"only the class {names[0]!r}" if names else "no labeled image"
        raise UserError(f"{data.manifest}: {found}; at least two classes are needed")
    splits = np.array([row.split for row in manifest.rows])
    counts = np.bincount(labels[splits == "labeled"], minlength=len(names))
    if not counts.all() and not data.allow_empty_classes:
        name = names[int(np.flatnonzero(counts == 0)[0])]
        near = hint(name, [other for other, count in zip(names, counts, strict=True) if count])
        raise ConfigError(
            f"class {name!r} has no labeled image{near}; add some, "
            "remove its folder, or set data.allow_empty_classes=true"
        )
    if not counts.any() or not (splits == "unlabeled").any():
        kind = "unlabeled" if counts.any() else "labeled"
        raise UserError(f"{data.manifest or data.labeled}: no usable {kind} image")
