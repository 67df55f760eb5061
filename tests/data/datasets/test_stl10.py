"""STL-10: column-major planes, the one resize, its cache, and the part without labels."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest

from simpro_fast.config import load_config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets import stl10
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.datasets.stl10 import read_images
from simpro_fast.data.splits.build import make_split
from simpro_fast.methods import resolve_alpha
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.stl10_format import stl10_members, write_stl10, write_stl10_archive


def load(root: Path, **keys: object) -> ArrayDataset:
    return load_dataset(DataConfig(name="stl10", root=root, **keys))  # type: ignore[arg-type]


# Two images of 3 planes of 96 columns of 96 bytes, the order in the published description:
# "the first 96*96 values are the red channel, ... stored in column-major order".
GOLDEN = (
    b"\x11\x22" + bytes(94)  # red, column 0: rows 0 and 1
    + b"\x33" + bytes(95)  # column 1
    + bytes(94 * 96)
    + bytes(95 * 96) + bytes(95) + b"\x44"  # green: the last row of the last column
    + bytes(96) + b"\x00\x00\x55" + bytes(93) + bytes(94 * 96)  # blue: row 2 of column 1
    + b"\x66" + bytes(3 * 96 * 96 - 1)  # second image
)  # fmt: skip


def test_golden_file() -> None:
    images = read_images(io.BytesIO(GOLDEN), len(GOLDEN), 96, "bilinear", "train_X.bin")
    expected = np.zeros((2, 96, 96, 3), np.uint8)
    expected[0, 0, 0, 0] = 0x11
    expected[0, 1, 0, 0] = 0x22
    expected[0, 0, 1, 0] = 0x33
    expected[0, 95, 95, 1] = 0x44
    expected[0, 2, 1, 2] = 0x55
    expected[1, 0, 0, 0] = 0x66
    np.testing.assert_array_equal(images, expected)


def triangle_thirds() -> np.ndarray:
    """float [32, 96]: the triangle filter of a reduction by 3, weights 1 2 3 2 1 (over 9)."""
    weights = np.zeros((32, 96))
    for i in range(32):
        for offset, weight in zip(range(-2, 3), (1, 2, 3, 2, 1), strict=True):
            if 0 <= 3 * i + 1 + offset < 96:
                weights[i, 3 * i + 1 + offset] = weight
    return weights / weights.sum(1, keepdims=True)


def test_reduction_is_the_antialiased_triangle(tmp_path: Path) -> None:
    members = stl10_members(per_class=1, unlabeled=2)
    small = load(write_stl10(tmp_path, members))
    large = load(tmp_path, image_size=96)
    assert small.images.shape == (10, 32, 32, 3) and large.images.shape == (10, 96, 96, 3)
    weights = triangle_thirds()
    expected = np.einsum("ir,jc,nrck->nijk", weights, weights, large.images)
    assert np.abs(small.images - expected).max() <= 1.0
    # white noise keeps (sum of squared weights)^2 of its variance: no plain sampling of pixels
    assert small.images.std() < 0.4 * large.images.std()


def test_parts_labels_and_truth(tmp_path: Path) -> None:
    dataset = load(write_stl10(tmp_path, stl10_members()))
    assert dataset.labels.tolist() == [*range(10)] * 3
    assert dataset.test_labels is not None and dataset.test_labels.tolist() == [*range(10)]
    assert dataset.class_names[0] == "airplane" and dataset.class_names[9] == "truck"
    assert dataset.unlabeled_images is not None
    assert dataset.unlabeled_images.shape == (40, 32, 32, 3)
    assert dataset.unlabeled_images.min() >= 200 and dataset.images.min() < 200
    assert dataset.mean == (0.4914, 0.4822, 0.4465)
    assert dataset.flip
    data = DataConfig(name="stl10", labeled_max=3, gamma_labeled=3.0)
    split = make_split(data, dataset, seed=1)
    assert split.labeled_counts[0] == 3 and split.labeled_counts[9] == 1
    assert split.unlabeled_counts is None and len(split.unlabeled) == 40
    assert (dataset.unlabeled_truth(split.unlabeled) == -1).all()


@pytest.mark.parametrize(("gamma", "total", "alpha"), [(10, 1835, 28 / 97), (20, 1528, 23 / 97)])
def test_published_split_and_alpha(gamma: int, total: int, alpha: float) -> None:
    config = load_config(f"stl10_lt/gamma{gamma}")
    dataset = ArrayDataset(
        name="stl10",
        images=np.zeros((5000, 1, 1, 3), np.uint8),
        labels=np.arange(5000) % 10,
        class_names=("x",) * 10,
        test_images=np.zeros((8000, 1, 1, 3), np.uint8),
        test_labels=np.arange(8000) % 10,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        flip=True,
        unlabeled_images=np.zeros((100_000, 1, 1, 3), np.uint8),
    )
    split = make_split(config.data, dataset, config.seed)
    assert (len(split.labeled), len(split.unlabeled), len(split.test)) == (total, 100_000, 8000)
    data = config.data
    resolved = resolve_alpha(config.method, total, 100_000, data.batch_size, data.mu)
    assert resolved == pytest.approx(alpha)


def test_archive_and_folder_are_the_same(tmp_path: Path) -> None:
    members = stl10_members(per_class=1, unlabeled=3)
    (tmp_path / "b").mkdir()
    folder = write_stl10(tmp_path / "a", members)
    archive = write_stl10_archive(tmp_path / "b", dict(reversed(members.items())))
    places = (tmp_path / "a", folder, tmp_path / "b", archive)
    assert len({load(place).fingerprint() for place in places}) == 1


def test_second_start_reads_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    members = stl10_members(per_class=1, unlabeled=3)
    folder = write_stl10(tmp_path, members)
    first = load(tmp_path).fingerprint()
    (cached,) = folder.glob("stl10_32px_*.npz")

    def unread(*_: object) -> None:
        raise AssertionError("the files were read again")

    with monkeypatch.context() as patch:
        patch.setattr(stl10, "read_images", unread)
        assert load(tmp_path).fingerprint() == first
        with pytest.raises(AssertionError):
            load(tmp_path, image_size=48)
        # other contents of the same size and place are noticed by their time
        os.utime(folder / "unlabeled_X.bin", ns=(1, 1))
        with pytest.raises(AssertionError):
            load(tmp_path)
    assert load(tmp_path).fingerprint() == first
    # and a damaged copy is made again
    newest = max(folder.glob("stl10_32px_*.npz"), key=lambda path: path != cached)
    for content in (b"", newest.read_bytes()[:-200], b"PK" + bytes(50)):
        newest.write_bytes(content)
        assert load(tmp_path).fingerprint() == first
    flipped = bytearray(newest.read_bytes())
    flipped[len(flipped) // 2] ^= 1
    newest.write_bytes(flipped)
    assert load(tmp_path).fingerprint() == first


def test_cache_folder(tmp_path: Path) -> None:
    folder = write_stl10(tmp_path / "a", stl10_members(per_class=1, unlabeled=3))
    elsewhere = tmp_path / "new" / "cache"
    load(tmp_path / "a", cache_dir=elsewhere)
    assert len(list(elsewhere.iterdir())) == 1
    assert not list(folder.glob("*.npz"))
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot be written .*; or set data\.cache_dir"):
        load(tmp_path / "a", cache_dir=tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train_X.bin", b"x" * 1000, "1000 bytes are not a whole number of 27648-byte images"),
        ("train_y.bin", b"\x01" * 9, r"labels are uint8 \[9\], expected 10 integers"),
        ("train_y.bin", b"\x00" + b"\x01" * 9, "holds label 0, expected 1 to 10"),
        ("test_y.bin", b"\x0b" * 10, "labels go from 11 to 11"),
        ("unlabeled_X.bin", None, r"without unlabeled_X\.bin; fetch the archive again"),
    ],
)
def test_foreign_files(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    members = stl10_members(per_class=1, unlabeled=1)
    if content is None:
        del members[name]
    else:
        members[name] = content
    folder = write_stl10(tmp_path, members)
    with pytest.raises(UserError, match=message):
        load(tmp_path)
    assert not list(folder.glob("*.npz"))


def test_damaged_archive_missing_files_and_sizes(tmp_path: Path) -> None:
    archive = write_stl10_archive(tmp_path, stl10_members(per_class=1, unlabeled=2))
    archive.write_bytes(archive.read_bytes()[:200_000])
    with pytest.raises(UserError, match=r"tar\.gz.*fetch it again") as info:
        load(tmp_path)
    assert "\n" not in str(info.value)
    for size in (4, 128):
        with pytest.raises(ConfigError, match=rf"image_size={size}: stl10 has images of 96 px"):
            load(tmp_path, image_size=size)
