"""Data sets as arrays: uint8 images [N, H, W, 3], labels and class names behind one type."""

from __future__ import annotations

import difflib
import gzip
import hashlib
import math
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from simpro_fast.config.schema import DataConfig
from simpro_fast.data.unpickle import load_pickled_dict
from simpro_fast.errors import ConfigError, UserError

Stats = tuple[float, float, float]


@dataclass(frozen=True, eq=False)
class ArrayDataset:
    """A data set held in memory.

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

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def image_size(self) -> int:
        """Side in pixels."""
        return int(self.images.shape[1])

    @property
    def unlabeled_pool(self) -> np.ndarray:
        """The images that `Split.unlabeled` counts."""
        return self.images if self.unlabeled_images is None else self.unlabeled_images

    def unlabeled_truth(self, indices: np.ndarray) -> np.ndarray:
        """int64 true labels of images of `unlabeled_pool`, -1 where unknown; for diagnostics."""
        if self.unlabeled_images is None:
            return self.labels[indices]
        return np.full(len(indices), -1, np.int64)

    def fingerprint(self) -> str:
        """sha256 over shapes, labels and image bytes of all parts."""
        digest = hashlib.sha256()
        for images, labels in (
            (self.images, self.labels),
            (self.test_images, self.test_labels),
        ):
            if images is None or labels is None:
                digest.update(b"no test part")
                continue
            digest.update(repr(images.shape).encode())
            digest.update(np.ascontiguousarray(labels, dtype="<i8").data)
            digest.update(np.ascontiguousarray(images).data)
        if self.unlabeled_images is not None:
            digest.update(repr(self.unlabeled_images.shape).encode())
            digest.update(np.ascontiguousarray(self.unlabeled_images).data)
        return digest.hexdigest()


def load_dataset(data: DataConfig) -> ArrayDataset:
    """Load the data set `data.name` from `data.root` or the place where it usually lies.

    Raises:
        ConfigError: unknown name, or an image size that the set does not have.
        UserError: files missing, damaged or of another format.
    """
    try:
        loader = _LOADERS[data.name]
    except KeyError:
        near = difflib.get_close_matches(data.name, _LOADERS, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(
            f"data.name={data.name!r} is unknown; {hint}known: {', '.join(_LOADERS)}"
        ) from None
    return loader(data)


def dataset_names() -> tuple[str, ...]:
    """The values that `data.name` may take."""
    return tuple(_LOADERS)


def _digits(data: DataConfig) -> ArrayDataset:
    """scikit-learn's 1,797 handwritten digits: 8x8 values 0..16, each pixel repeated."""
    from sklearn.datasets import load_digits

    size = data.image_size or 16
    if size % 8:
        raise ConfigError(
            f"data.image_size={size}: digits are 8x8 with repeated pixels, so the side must be "
            f"a multiple of 8; nearest: {max(8, 8 * round(size / 8))}"
        )
    bundle = load_digits()
    values = np.minimum(bundle.images.astype(np.int64) * 16, 255).astype(np.uint8)
    images = values.repeat(size // 8, axis=1).repeat(size // 8, axis=2)
    return ArrayDataset(
        name="digits",
        images=_rgb(images),
        labels=bundle.target.astype(np.int64),
        class_names=tuple(str(digit) for digit in range(10)),
        test_images=None,
        test_labels=None,
        mean=(0.3061, 0.3061, 0.3061),
        std=(0.3769, 0.3769, 0.3769),
        flip=False,
    )


_FASHION_DEBIAN = Path("/usr/share/datasets/fashion-mnist")
_FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def _fashion_mnist(data: DataConfig) -> ArrayDataset:
    """Fashion-MNIST from its four idx files, compressed or not."""
    _check_size(data, 28)
    root = data.root or _FASHION_DEBIAN
    parts = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        images_path = _fashion_file(root, f"{prefix}-images-idx3-ubyte")
        labels_path = _fashion_file(root, f"{prefix}-labels-idx1-ubyte")
        images, labels = read_idx(images_path), read_idx(labels_path)
        if images.ndim != 3 or images.shape[1:] != (28, 28):
            raise UserError(f"{images_path}: holds {list(images.shape)}, expected [N, 28, 28]")
        parts[part] = _rgb(images), _labels(labels, len(images), 10, str(labels_path))
    return ArrayDataset(
        name="fashion_mnist",
        images=parts["train"][0],
        labels=parts["train"][1],
        class_names=_FASHION_CLASSES,
        test_images=parts["test"][0],
        test_labels=parts["test"][1],
        mean=(0.2860, 0.2860, 0.2860),
        std=(0.3530, 0.3530, 0.3530),
        flip=True,
    )


def _fashion_file(root: Path, name: str) -> Path:
    for path in (root / f"{name}.gz", root / name):
        if path.is_file():
            return path
    raise UserError(
        f"fashion_mnist: {name}.gz is not in {root}; `apt install dataset-fashion-mnist`, or set "
        "data.root to the folder of the four idx files"
    )


def read_idx(path: Path) -> np.ndarray:
    """Read an idx file of unsigned bytes (the MNIST format), gzip-compressed or not.

    The format: two zero bytes, the element type (8 is unsigned byte), the number of dimensions,
    each dimension as a big-endian 32-bit integer, the elements in C order.

    Raises:
        UserError: cut short, too long, or not an idx file of unsigned bytes.
    """
    with _reading(path):
        raw = path.read_bytes()
        content = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    if len(content) < 4 or content[:2] != b"\0\0":
        raise UserError(f"{path}: not an idx file (starts with {content[:4].hex() or 'nothing'})")
    if content[2] != 8:
        raise UserError(f"{path}: idx element type {content[2]:#04x}, expected 0x08 (bytes)")
    offset = 4 + 4 * content[3]
    if len(content) < offset:
        raise UserError(f"{path}: cut short inside the header; fetch it again")
    shape = tuple(int(n) for n in np.frombuffer(content[4:offset], ">u4"))
    expected = offset + math.prod(shape)
    if len(content) != expected:
        problem = "cut short" if len(content) < expected else "too long"
        raise UserError(
            f"{path}: {problem}, {len(content)} bytes where its header {list(shape)} "
            f"needs {expected}; fetch it again"
        )
    return np.frombuffer(content, np.uint8, offset=offset).reshape(shape)


@dataclass(frozen=True)
class _Cifar:
    """Where the parts of a published python archive are."""

    folder: str
    archive: str
    train: tuple[str, ...]
    test: str
    meta: str
    labels_key: str
    names_key: str
    num_classes: int
    mean: Stats
    std: Stats


_CIFAR = {
    "cifar10": _Cifar(
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test="test_batch",
        meta="batches.meta",
        labels_key="labels",
        names_key="label_names",
        num_classes=10,
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2471, 0.2435, 0.2616),
    ),
    "cifar100": _Cifar(
        folder="cifar-100-python",
        archive="cifar-100-python.tar.gz",
        train=("train",),
        test="test",
        meta="meta",
        labels_key="fine_labels",
        names_key="fine_label_names",
        num_classes=100,
        mean=(0.5071, 0.4867, 0.4408),
        std=(0.2675, 0.2565, 0.2761),
    ),
}


def _cifar(data: DataConfig) -> ArrayDataset:
    """CIFAR-10 or CIFAR-100 from the published python archive, extracted or as tar.gz."""
    _check_size(data, 32)
    layout = _CIFAR[data.name]
    source = _find_cifar(data, layout)
    members = _read_members(source, layout)
    meta = members[layout.meta]
    names = tuple(str(name) for name in _entry(meta, layout.names_key, source / layout.meta))
    if len(names) != layout.num_classes:
        raise UserError(
            f"{source / layout.meta}: {len(names)} class names, expected {layout.num_classes}"
        )
    train = [_cifar_batch(members[name], layout, source / name) for name in layout.train]
    test_images, test_labels = _cifar_batch(members[layout.test], layout, source / layout.test)
    return ArrayDataset(
        name=data.name,
        images=np.concatenate([images for images, _ in train]),
        labels=np.concatenate([labels for _, labels in train]),
        class_names=names,
        test_images=test_images,
        test_labels=test_labels,
        mean=layout.mean,
        std=layout.std,
        flip=True,
    )


def _find_cifar(data: DataConfig, layout: _Cifar) -> Path:
    """The extracted folder or the archive, in `data.root` or under `data/`."""
    root = data.root or Path("data")
    if root.is_file() or (root / layout.meta).is_file():
        return root
    for path in (root / layout.folder, root / layout.archive):
        if path.exists():
            return path
    raise UserError(
        f"{data.name}: neither {layout.folder}/ nor {layout.archive} is in {root}; get the python "
        "version from https://www.cs.toronto.edu/~kriz/cifar.html and set data.root to its folder"
    )


def _read_members(source: Path, layout: _Cifar) -> dict[str, dict[str, Any]]:
    """Parse the pickled files. An archive is read in memory, so that several processes may start
    at once on a fresh machine without one seeing what another has half unpacked."""
    wanted = (*layout.train, layout.test, layout.meta)
    found: dict[str, dict[str, Any]] = {}

    def take(name: str, file: BinaryIO) -> None:
        found[name] = load_pickled_dict(file, str(source / name))

    with _reading(source):
        if source.is_dir():
            for name in wanted:
                if (source / name).is_file():
                    with (source / name).open("rb") as file:
                        take(name, file)
        else:
            with tarfile.open(source, "r:*") as archive:
                for member in archive:
                    folder, _, name = member.name.removeprefix("./").rpartition("/")
                    if member.isfile() and folder == layout.folder and name in wanted:
                        stream = archive.extractfile(member)
                        assert stream is not None  # only for members that are no files
                        take(name, stream)  # type: ignore[arg-type]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise UserError(f"{source}: without {', '.join(missing)}; fetch the archive again")
    return found


def _cifar_batch(
    content: dict[str, Any], layout: _Cifar, source: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Images uint8 [n, 32, 32, 3] and labels int64 [n] of one pickled file."""
    planar = _entry(content, "data", source)
    if (
        not isinstance(planar, np.ndarray)
        or planar.dtype != np.uint8
        or planar.ndim != 2
        or planar.shape[1] != 3072
    ):
        found = f"{planar.dtype} {list(planar.shape)}" if isinstance(planar, np.ndarray) else planar
        raise UserError(f"{source}: data is {found!s:.60}, expected uint8 [n, 3072]")
    images = np.ascontiguousarray(planar.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))
    labels = _entry(content, layout.labels_key, source)
    return images, _labels(labels, len(images), layout.num_classes, str(source))


def _entry(content: dict[str, Any], key: str, source: Path) -> Any:
    if key not in content:
        raise UserError(f"{source}: has no {key!r}, only {', '.join(sorted(content)) or 'nothing'}")
    return content[key]


def _labels(labels: Any, count: int, num_classes: int, source: str) -> np.ndarray:
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


def _rgb(gray: np.ndarray) -> np.ndarray:
    """[N, H, W] to [N, H, W, 3]."""
    return np.repeat(gray[..., None], 3, axis=3)


def _check_size(data: DataConfig, native: int) -> None:
    if data.image_size not in (None, native):
        raise ConfigError(
            f"data.image_size={data.image_size}: {data.name} is used at its own {native} px; "
            f"set data.image_size={native} or leave it out"
        )


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn what the standard library raises on a damaged file into one line."""
    try:
        yield
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        # tarfile appends a line for every kind of compression it tried
        reason = (str(error) or type(error).__name__).splitlines()[0].rstrip(":")
        raise UserError(f"{path}: unreadable ({reason}); fetch it again") from None


_LOADERS: dict[str, Callable[[DataConfig], ArrayDataset]] = {
    "digits": _digits,
    "fashion_mnist": _fashion_mnist,
    "cifar10": _cifar,
    "cifar100": _cifar,
}
