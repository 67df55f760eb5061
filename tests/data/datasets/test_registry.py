"""Data sets: contents, and one clear line for every file that is missing, damaged or foreign."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.fashion_mnist import read_idx
from simpro_fast.data.datasets.registry import dataset_names, load_dataset
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.cifar_format import (
    cifar10_members,
    cifar100_members,
    cifar_images,
    pickled,
    write_archive,
    write_folder,
)
from tests.data.fashion_mnist_format import idx_bytes, write_fashion

FASHION = Path("/usr/share/datasets/fashion-mnist")
CIFAR10 = "cifar-10-batches-py"


# digits


def test_digits_are_the_real_ones_repeated() -> None:
    dataset = load_dataset(DataConfig(name="digits"))
    assert dataset.images.shape == (1797, 16, 16, 3)
    assert dataset.images.dtype == np.uint8
    assert dataset.labels.dtype == np.int64
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert np.bincount(dataset.labels).tolist() == counts
    assert dataset.labels[:10].tolist() == [2, 4, 5, 4, 8, 2, 0, 6, 3, 3]  # one order, everywhere
    # First row of the first digit in the published file, a zero: 0 0 5 13 9 1 0 0, values 0..16.
    (found,) = np.flatnonzero(
        (dataset.images[:, 0, ::2, 0] == [0, 0, 80, 208, 144, 16, 0, 0]).all(1)
    )
    assert dataset.labels[found] == 0
    assert dataset.images.max() == 255
    blocks = dataset.images.reshape(1797, 8, 2, 8, 2, 3)
    assert (blocks == blocks[:, :, :1, :, :1, :1]).all()
    assert dataset.test_images is None
    assert dataset.test_labels is None
    assert not dataset.flip
    small = load_dataset(DataConfig(name="digits", image_size=8))
    np.testing.assert_allclose(small.images.mean((0, 1, 2)) / 255, dataset.mean, atol=1e-4)
    np.testing.assert_allclose(small.images.std((0, 1, 2)) / 255, dataset.std, atol=1e-4)


def test_unknown_name_gives_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'cifar01' is unknown; did you mean 'cifar10'"):
        load_dataset(DataConfig(name="cifar01"))
    assert {"digits", "fashion_mnist", "cifar10", "cifar100", "svhn"} <= set(dataset_names())


@pytest.mark.parametrize("name", ["fashion_mnist", "cifar10", "svhn", "stl10", "small_imagenet_1k"])
def test_missing_files_and_where_to_get_them_are_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=rf"^{name}: .* {tmp_path}.*(get|install) .*data\.root"):
        load_dataset(DataConfig(name=name, root=tmp_path))


@pytest.mark.parametrize(
    ("name", "size"), [("digits", 20), ("fashion_mnist", 20), ("cifar10", 64), ("svhn", 64)]
)
def test_a_size_that_the_set_does_not_have(name: str, size: int) -> None:
    with pytest.raises(ConfigError, match=rf"data\.image_size={size}: "):
        load_dataset(DataConfig(name=name, image_size=size))


def test_fingerprint_sees_every_part(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    first = load_dataset(DataConfig(name="fashion_mnist", root=tmp_path))
    again = load_dataset(DataConfig(name="fashion_mnist", root=tmp_path))
    assert first.fingerprint() == again.fingerprint()
    seen = {first.fingerprint()}
    for array in (again.images, again.labels, again.test_images, again.test_labels):
        assert array is not None
        array.flat[-1] ^= 1
        seen.add(again.fingerprint())
    assert len(seen) == 5


# fashion_mnist


def test_fashion_mnist_format(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    plain = tmp_path / "t10k-labels-idx1-ubyte"
    plain.write_bytes(gzip.decompress(plain.with_name(plain.name + ".gz").read_bytes()))
    plain.with_name(plain.name + ".gz").unlink()
    dataset = load_dataset(DataConfig(name="fashion_mnist", root=tmp_path))
    assert dataset.images.shape == (20, 28, 28, 3)
    assert dataset.test_images is not None and dataset.test_images.shape == (10, 28, 28, 3)
    assert (dataset.images[..., :1] == dataset.images).all()
    expected = np.random.default_rng(0).integers(0, 256, (20, 28, 28))
    np.testing.assert_array_equal(dataset.images[..., 2], expected)
    assert dataset.labels.tolist() == [*range(10)] * 2
    assert dataset.class_names[9] == "Ankle boot"


def test_fashion_mnist_has_smaller_and_larger_sizes(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    larger = load_dataset(DataConfig(name="fashion_mnist", root=tmp_path, image_size=56)).images
    assert larger.shape == (20, 56, 56, 3)
    first = np.random.default_rng(0).integers(0, 256, (20, 28, 28))[0]
    middle = larger[0, 26:30, 26:30, 0].mean()  # of what lies around it
    assert abs(middle - first[12:16, 12:16].mean()) < 64
    whole, half = (
        load_dataset(DataConfig(name="fashion_mnist", root=tmp_path, image_size=side))
        for side in (28, 14)
    )
    for images, smaller in (
        (whole.images, half.images),
        (whole.test_images, half.test_images),
    ):
        mean = images.reshape(-1, 14, 2, 14, 2, 3).astype(np.float64).mean((2, 4))
        assert smaller.dtype == np.uint8
        np.testing.assert_array_equal(smaller, np.floor(mean + 0.5))


@pytest.mark.skipif(not FASHION.is_dir(), reason="Debian package dataset-fashion-mnist is absent")
def test_fashion_mnist_from_the_debian_package() -> None:
    dataset = load_dataset(DataConfig(name="fashion_mnist"))
    assert dataset.images.shape == (60000, 28, 28, 3)
    assert dataset.test_images is not None and len(dataset.test_images) == 10000
    assert np.bincount(dataset.labels).tolist() == [6000] * 10
    gray = dataset.images[..., 0] / np.float32(255)
    assert abs(gray.mean() - dataset.mean[0]) < 1e-4
    assert abs(gray.std() - dataset.std[0]) < 1e-4


IDX = idx_bytes(np.arange(12).reshape(3, 2, 2))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not an idx file .*nothing"),
        (b"hello world", "not an idx file .*68656c6c"),
        (b"\0\0\x0d" + IDX[3:], "element type 0x0d, expected 0x08"),
        (IDX[:10], "cut short inside the header"),
        (IDX[:-1], r"cut short, 27 bytes where its header \[3, 2, 2\] needs 28"),
        (IDX + b"x", "too long, 29 bytes"),
        (gzip.compress(IDX, mtime=0)[:-9], "unreadable"),
        (gzip.compress(IDX, mtime=0)[:10] + b"\xff" * 20, "unreadable"),
    ],
)
def test_damaged_idx_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"images\.gz: .*{message}"):
        read_idx(path)


def test_idx_files_that_do_not_belong_together(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx_bytes(np.arange(19) % 10)))
    with pytest.raises(UserError, match=r"train-labels.*\[19\], expected 20 integers"):
        load_dataset(DataConfig(name="fashion_mnist", root=tmp_path))
    labels.write_bytes(gzip.compress(idx_bytes(np.arange(20))))
    with pytest.raises(UserError, match="labels go from 0 to 19, expected 0 to 9"):
        load_dataset(DataConfig(name="fashion_mnist", root=tmp_path))


# cifar


def assert_small_cifar10(root: Path) -> str:
    dataset = load_dataset(DataConfig(name="cifar10", root=root))
    assert dataset.images.shape == (100, 32, 32, 3)
    assert dataset.labels.tolist() == list(range(10)) * 10
    assert dataset.class_names == tuple(f"class {k}" for k in range(10))
    assert dataset.test_images is not None and dataset.test_images.shape == (20, 32, 32, 3)
    planar = cifar_images(20, seed=3)  # data_batch_4
    red, green = dataset.images[60:80, :, :, 0], dataset.images[60:80, :, :, 1]
    np.testing.assert_array_equal(red.reshape(20, 1024), planar[:, :1024])
    np.testing.assert_array_equal(green.reshape(20, 1024), planar[:, 1024:2048])
    assert dataset.images.flags.c_contiguous
    return dataset.fingerprint()


def test_cifar10_folder_and_archive_are_the_same(tmp_path: Path) -> None:
    write_folder(tmp_path / "a", CIFAR10, cifar10_members())
    (tmp_path / "b").mkdir()
    write_archive(tmp_path / "b", "cifar-10-python.tar.gz", CIFAR10, cifar10_members())
    places = [
        tmp_path / "a",
        tmp_path / "a" / CIFAR10,
        tmp_path / "b",
        tmp_path / "b" / "cifar-10-python.tar.gz",
    ]
    assert len({assert_small_cifar10(place) for place in places}) == 1


def test_cifar100_uses_the_fine_labels(tmp_path: Path) -> None:
    write_archive(tmp_path, "cifar-100-python.tar.gz", "cifar-100-python", cifar100_members())
    dataset = load_dataset(DataConfig(name="cifar100", root=tmp_path))
    assert dataset.labels.tolist() == list(range(100))
    assert dataset.class_names[99] == "fine 99"
    assert dataset.images.shape == (100, 32, 32, 3)
    assert dataset.mean == (0.5071, 0.4867, 0.4408)


def test_damaged_cifar_archives(tmp_path: Path) -> None:
    archive = tmp_path / "cifar-10-python.tar.gz"
    config = DataConfig(name="cifar10", root=tmp_path)
    write_archive(tmp_path, archive.name, CIFAR10, cifar10_members())
    whole = archive.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"<html>404</html>"):
        archive.write_bytes(content)
        with pytest.raises(UserError, match=r"cifar-10-python\.tar\.gz.*fetch it again") as info:
            load_dataset(config)
        assert "\n" not in str(info.value)
    members = cifar10_members()
    del members["data_batch_2"], members["test_batch"]
    write_archive(tmp_path, archive.name, CIFAR10, members)
    with pytest.raises(UserError, match="without data_batch_2, test_batch"):
        load_dataset(config)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"labels": [0]}, "has no 'data', only labels"),
        ({"labels": [0], "data": "x"}, r"data is x, expected uint8 \[n, 3072\]"),
        ({"labels": [0], "data": cifar_images(2, 0)[:, :3000]}, r"data is uint8 \[2, 3000\]"),
        ({"labels": [0], "data": cifar_images(2, 0)}, "expected 2 integers"),
        ({"labels": [0, 10], "data": cifar_images(2, 0)}, "labels go from 0 to 10"),
    ],
)
def test_cifar_batches_of_another_format(tmp_path: Path, content: dict, message: str) -> None:
    write_folder(tmp_path, CIFAR10, cifar10_members() | {"data_batch_1": pickled(content)})
    with pytest.raises(UserError, match=rf"data_batch_1: .*{message}"):
        load_dataset(DataConfig(name="cifar10", root=tmp_path))


# synthetic


def test_synthetic_images_are_those_asked_for_and_always_the_same() -> None:
    data = DataConfig(name="synthetic", classes=5, labeled_max=3, unlabeled_max=4, image_size=20)
    dataset = load_dataset(data)
    assert dataset.images.shape == (35, 20, 20, 3)
    assert np.bincount(dataset.labels).tolist() == [7] * 5
    assert dataset.test_images is not None and len(dataset.test_images) == 50
    assert dataset.fingerprint() == load_dataset(data).fingerprint()
    assert len(np.unique(dataset.images, axis=0)) == 35
    # A class is nearer to its own mean image than to another's.
    means = dataset.images.reshape(5, 7, -1).mean(1)
    distances = ((dataset.test_images.reshape(50, 1, -1) - means[None]) ** 2).sum(2)
    assert (distances.argmin(1) == dataset.test_labels).all()


def test_classes_are_for_synthetic_images_alone() -> None:
    with pytest.raises(ValueError, match="classes is for name=synthetic"):
        DataConfig(name="digits", classes=10)
    with pytest.raises(ConfigError, match="labeled_fraction=null"):
        load_dataset(DataConfig(name="synthetic", labeled_fraction=0.1))
