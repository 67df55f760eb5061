"""The type behind which all data sets look alike, and the checks that their readers share."""

from __future__ import annotations

import hashlib
import tarfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from simpro_fast.config.data import DataConfig, Fit, Interpolation
from simpro_fast.data.augment.crops import Square
from simpro_fast.utils.errors import ConfigError, UserError

Stats = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """A data set behind arrays: in memory, memory-mapped, or files that are decoded when asked for.

    The labeled and the unlabeled set are both cut out of `images`, unless the set was published
    with an unlabeled part of its own (`unlabeled_images`). A set without a test part has
    `test_images` and `test_labels` None; its split holds images out of `images` instead.
    """

    name: str
    images: np.ndarray
    """uint8 [N, H, W, 3]; grayscale sets repeat their channel."""
    labels: np.ndarray
    """int64 [N], 0 .. K-1."""
    class_names: tuple[str, ...]
    test_images: np.ndarray | None
    """uint8 [T, H, W, 3]."""
    test_labels: np.ndarray | None
    """int64 [T]."""
    mean: Stats
    """Per channel, on the scale 0 .. 1."""
    std: Stats
    flip: bool
    """Whether a horizontal flip keeps the label."""
    unlabeled_images: np.ndarray | None = None
    """uint8 [U, H, W, 3] of unknown classes; None: unlabeled images are some of `images`."""
    images_sha256: str | None = None
    """Digest of the bytes of `images`, `test_images`, `unlabeled_images`, where known already."""
    fit: Fit = "crop"
    """How pictures become squares; of sets of squares, how a trained network sees other pictures.
    Like mean and std `load_dataset` sets these two by the section `data`."""
    interpolation: Interpolation = "bilinear"

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_size(self) -> int:
        """Side in pixels."""
        return int(self.images.shape[1])

    @property
    def square(self) -> Square:
        """How a picture becomes what the network sees."""
        return Square.of(self.image_size, self.fit, self.interpolation, self.mean)

    @property
    def preprocessing(self) -> str:
        """Square and normalisation in words; runs that differ in them are different runs."""
        mean, std = (" ".join(f"{v:.6g}" for v in values) for values in (self.mean, self.std))
        return f"{self.image_size} px, {self.fit}, {self.interpolation}, mean {mean}, std {std}"

    @property
    def unlabeled_pool(self) -> np.ndarray:
        """The images that the dataset rows in `Split.unlabeled` count."""
        return self.images if self.unlabeled_images is None else self.unlabeled_images

    @property
    def test_part(self) -> tuple[np.ndarray, np.ndarray]:
        """The images and labels that the dataset rows in `Split.test` count."""
        if self.test_images is None or self.test_labels is None:
            return self.images, self.labels
        return self.test_images, self.test_labels

    def unlabeled_truth(self, dataset_rows: np.ndarray) -> np.ndarray:
        """int64 true labels of rows of `unlabeled_pool`, -1 where unknown; for diagnostics."""
        if self.unlabeled_images is None:
            return self.labels[dataset_rows]
        return np.full(len(dataset_rows), -1, np.int64)

    def fingerprint(self) -> str:
        """sha256 over shapes, labels and image bytes of all parts."""
        parts = (self.images, self.test_images, self.unlabeled_images)
        digest = hashlib.sha256(repr([None if p is None else p.shape for p in parts]).encode())
        for labels in (self.labels, self.test_labels):
            if labels is not None:
                digest.update(np.ascontiguousarray(labels, dtype="<i8").data)
        digest.update((self.images_sha256 or _sha256(parts)).encode())
        return digest.hexdigest()

    def files_state(self) -> str:
        """Describe what `fingerprint` leaves open where it has not read every image; else empty."""
        return ""


def _sha256(parts: Iterable[np.ndarray | None]) -> str:
    """Hash the bytes of arrays, one after another."""
    digest = hashlib.sha256()
    for part in parts:
        if part is not None:
            digest.update(np.ascontiguousarray(part).data)
    return digest.hexdigest()


class Rows:
    """Some images of an array, gathered a slice at a time: what evaluation asks of an array."""

    def __init__(self, images: np.ndarray, dataset_rows: np.ndarray) -> None:
        self._images, self._dataset_rows = images, dataset_rows
        self.dtype, self.shape = images.dtype, (len(dataset_rows), *images.shape[1:])
        self.ndim = images.ndim

    def __len__(self) -> int:
        return len(self._dataset_rows)

    def __getitem__(self, index: slice) -> np.ndarray:
        return np.asarray(self._images[self._dataset_rows[index]])


def checked_labels(labels: Any, count: int, num_classes: int, source: str) -> np.ndarray:
    """int64 [count], checked against the images and the classes."""
    array = np.asarray(labels)
    if array.dtype.kind not in "iu" or array.shape != (count,):
        raise UserError(
            f"{source}: labels are {array.dtype} {list(array.shape)}, expected {count} integers"
        )
    if count and not (array.min() >= 0 and array.max() < num_classes):
        raise UserError(
            f"{source}: labels go from {array.min()} to {array.max()}, "
            f"expected 0 to {num_classes - 1}"
        )
    return array.astype(np.int64)


def labeled_share(images: int, fraction: float) -> int:
    """`fraction` of a class, rounded to the nearest and halves to even (ImageNet-127)."""
    return round(fraction * images)


def gray_to_rgb(gray: np.ndarray) -> np.ndarray:
    """[N, H, W] to [N, H, W, 3]."""
    return np.repeat(gray[..., None], 3, axis=3)


def check_size(data: DataConfig, native: int) -> None:
    """Refuse a `data.image_size` other than that of the published images."""
    if data.image_size not in (None, native):
        raise ConfigError(
            f"data.image_size={data.image_size}: {data.name} is used at its own {native} px; "
            f"set data.image_size={native} or leave it out"
        )


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what the standard library raises on a damaged file into one line."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        # tarfile appends a line for every kind of compression it tried
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise UserError(f"{path}: unreadable ({reason}); fetch it again") from None


def find_published(data: DataConfig, folder: str, archive: str, inside: str, home: str) -> Path:
    """The folder of a published set's files or its archive, in `data.root` or under `data/`.

    Args:
        inside: a file that the folder holds.
        home: where to get the archive.

    Raises:
        UserError: neither is there.
    """
    root = data.root or Path("data")
    if root.is_file() or (root / inside).is_file():
        return root
    for path in (root / folder, root / archive):
        if path.exists():
            return path
    raise UserError(
        f"{data.name}: neither {folder}/ nor {archive} is in {root}; get them from {home} and set "
        "data.root to their folder"
    )


def published_files(
    source: Path, folder: str, wanted: Collection[str]
) -> Iterator[tuple[str, BinaryIO, int]]:
    """Name, content and size of the wanted files of a folder, or of `folder` in an archive.

    An archive is read without unpacking it, so that several processes may start at once on a fresh
    machine without one seeing what another has half unpacked.

    Raises:
        UserError: one is missing, once the others were read.
        Exception: what `reading` takes, around the reading of the files.
    """
    missing = dict.fromkeys(wanted)
    if source.is_dir():
        for name in wanted:
            if (source / name).is_file():
                with (source / name).open("rb") as file:
                    yield name, file, (source / name).stat().st_size
                del missing[name]
    else:
        with tarfile.open(source, "r:*") as archive:
            for member in archive:
                parent, _, name = member.name.removeprefix("./").rpartition("/")
                stream = archive.extractfile(member) if member.isfile() else None
                if stream is not None and parent == folder and name in missing:
                    yield name, stream, member.size  # type: ignore[misc]
                    del missing[name]
    if missing:
        raise UserError(f"{source}: without {', '.join(missing)}; fetch the archive again")
