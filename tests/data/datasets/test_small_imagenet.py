"""Small ImageNet: format, class order, 127 parents, re-indexing, splits and the test subset."""

from __future__ import annotations

import json
import logging
import multiprocessing
import pickle
import weakref
from collections import Counter
from dataclasses import replace
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch

from simpro_fast.config import load_config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets import small_imagenet
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.imagenet_classes import class_list, superclasses
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.datasets.small_imagenet import read_batch
from simpro_fast.data.splits.build import make_split
from simpro_fast.methods import build_method, resolve_alpha
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.small_imagenet_format import planes, spelled, write_batch, write_small_imagenet
from tests.data.toy_split import config as toy_config
from tests.data.toy_split import make_dataset
from tests.methods.settings import setting
from tests.processes import PATIENCE

TABLES = Path(str(resources.files("simpro_fast.data.datasets"))) / "imagenet_lists"
ROWS = json.loads((TABLES / "imagenet_clsloc_wnids.json").read_text())
PARENTS = json.loads((TABLES / "imagenet127_wnid_map.json").read_text())
VAL = np.tile(np.arange(1, 1001), 2)


def load(name: str, root: Path, **keys: object) -> ArrayDataset:
    return load_dataset(DataConfig(name=name, root=root, **keys))  # type: ignore[arg-type]


# the format

# One file of two 32x32 images, byte by byte as Python 2 wrote it.
GOLDEN = (
    b"\x80\x02}q\x01("
    b"U\x06labelsq\x02]q\x03(K\x01M\xe8\x03e"  # 1 and 1000
    b"U\x04dataq\x04cnumpy.core.multiarray\n_reconstruct\nq\x05cnumpy\nndarray\nq\x06"
    b"K\x00\x85U\x01b\x87Rq\x07(K\x01K\x02M\x00\x0c\x86"  # shape (2, 3072)
    b"cnumpy\ndtype\nq\x08U\x02u1K\x00K\x01\x87Rq\x09"
    b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    b"\x89T\x00\x18\x00\x00"  # 6144 bytes, row after row, plane after plane
    + b"\x11\x22" + bytes(30)  # red, row 0: columns 0 and 1
    + b"\x33" + bytes(31) + bytes(30 * 32)  # row 1
    + b"\x44" + bytes(1023)  # green
    + bytes(1023) + b"\x55"  # blue: the last column of the last row
    + b"\x66" + bytes(3071)  # second image
    + b"tbu."
)  # fmt: skip


def test_golden_file(tmp_path: Path) -> None:
    path = tmp_path / "val_data"
    path.write_bytes(GOLDEN)
    planar, labels = read_batch(path)
    assert labels.tolist() == [0, 999]
    expected = np.zeros((2, 3, 32, 32), np.uint8)
    expected[0, 0, 0, :2] = 0x11, 0x22
    expected[0, 0, 1, 0] = 0x33
    expected[0, 1, 0, 0] = 0x44
    expected[0, 2, 31, 31] = 0x55
    expected[1, 0, 0, 0] = 0x66
    np.testing.assert_array_equal(planar, expected)


@pytest.mark.parametrize("side", [32, 64])
def test_one_thousand_classes_in_the_order_of_the_files(tmp_path: Path, side: int) -> None:
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:50], side)
    dataset = load("small_imagenet_1k", tmp_path, image_size=side)
    assert dataset.images.shape == (1000, side, side, 3) and dataset.images.flags.c_contiguous
    np.testing.assert_array_equal(spelled(dataset.images), dataset.labels + 1)
    assert dataset.test_images is not None and dataset.test_labels is not None
    np.testing.assert_array_equal(spelled(dataset.test_images), dataset.test_labels + 1)
    assert dataset.class_names[:2] == ("kit_fox", "English_setter")
    assert dataset.class_names == tuple(name for _, name in ROWS)
    assert dataset.mean == (0.48109809, 0.45747185, 0.40785507)
    assert dataset.std == (0.26040889, 0.2532126, 0.26820634)
    batches = [planes_of(tmp_path / f"train_data_batch_{i}") for i in range(1, 11)]
    blue = np.concatenate(batches)[:, -side * side :].reshape(-1, side, side)
    np.testing.assert_array_equal(dataset.images[..., 2], blue)


def planes_of(path: Path) -> np.ndarray:
    return pickle.loads(path.read_bytes())["data"]


def test_files_in_folders_of_their_own(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path / "train", tmp_path / "val", 1, VAL[:10])
    assert len(load("small_imagenet_1k", tmp_path).images) == 1000
    write_batch(tmp_path / "val_data", VAL[:10], 32)
    with pytest.raises(UserError, match=r"val_data is in .* and in .*; set data\.root to one"):
        load("small_imagenet_1k", tmp_path)


def test_missing_files_and_other_sizes(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:10])
    with pytest.raises(ConfigError, match=r"image_size=64: the files in .* hold 32 px"):
        load("small_imagenet_1k", tmp_path, image_size=64)
    write_batch(tmp_path / "train_data_batch_7", VAL[:3], 64)
    with pytest.raises(UserError, match="train_data_batch_7: images of 64 px, but"):
        load("small_imagenet_1k", tmp_path)


def test_one_file_at_a_time_and_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 64 px the set is 16 GB, and each of several processes would hold it."""
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:10])
    read, alive = small_imagenet.read_batch, []

    def watched(path: Path) -> tuple[np.ndarray, np.ndarray]:
        assert not any(planes() is not None for planes in alive), "the file before is still held"
        planes, labels = read(path)
        alive.append(weakref.ref(planes))
        return planes, labels

    monkeypatch.setattr(small_imagenet, "read_batch", watched)
    first = load("small_imagenet_1k", tmp_path)
    assert len(alive) == 11
    for images in (first.images, first.test_images):
        assert isinstance(images, np.memmap) and not images.flags.writeable
    again = load("small_imagenet_127", tmp_path)
    assert len(alive) == 11, "the second start maps the copy"
    assert np.array_equal(again.images, first.images)


def test_the_kept_digest_is_that_of_the_images(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:10])
    kept = load("small_imagenet_1k", tmp_path)
    assert kept.images_sha256 is not None
    assert replace(kept, images_sha256=None).fingerprint() == kept.fingerprint()


def test_a_copy_that_is_not_what_was_written_is_made_again(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:10])
    first = load("small_imagenet_1k", tmp_path)
    expected, pixels = first.fingerprint(), np.array(first.images)
    (images,) = tmp_path.glob("small_imagenet_*.images")
    for damage in (
        lambda: images.write_bytes(b"\0" * images.stat().st_size),
        lambda: images.write_bytes(b"short"),
        lambda: images.with_suffix(".npz").write_bytes(b"PK"),
        images.with_suffix(".npz").unlink,
    ):
        damage()
        again = load("small_imagenet_1k", tmp_path)
        assert again.fingerprint() == expected
        assert np.array_equal(again.images, pixels)
    # other source files have another copy
    write_batch(tmp_path / "val_data", VAL[:12], 32)
    assert load("small_imagenet_1k", tmp_path).fingerprint() != expected


def test_copies_elsewhere_and_nothing_left_of_a_failure(tmp_path: Path) -> None:
    root, cache = tmp_path / "files", tmp_path / "cache"
    write_small_imagenet(root, root, 1, VAL[:10])
    before = sorted(root.iterdir())
    load("small_imagenet_1k", root, cache_dir=cache)
    assert sorted(root.iterdir()) == before
    assert len(list(cache.glob("*.images"))) == 1
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(UserError, match=r"cannot be written .*set data\.cache_dir"):
        load("small_imagenet_1k", root, cache_dir=tmp_path / "file")
    (root / "train_data_batch_7").write_bytes(b"damaged")
    with pytest.raises(UserError, match="train_data_batch_7"):
        load("small_imagenet_1k", root)
    assert {path.suffix for path in set(root.iterdir()) - set(before)} <= {".lock"}


def _open_copy(root: Path, queue: multiprocessing.Queue) -> None:
    queue.put(load("small_imagenet_1k", root).fingerprint())


def test_several_processes_write_one_copy(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:10])
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=_open_copy, args=(tmp_path, queue)) for _ in range(4)]
    for worker in workers:
        worker.start()
    seen = {queue.get(timeout=PATIENCE) for _ in workers}
    for worker in workers:
        worker.join()
    assert seen == {load("small_imagenet_1k", tmp_path).fingerprint()}
    assert len(list(tmp_path.glob("*.images"))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"data": planes(VAL[:2], 32)}, "has no 'labels', only data"),
        ({"data": [1, 2], "labels": [1, 2]}, "data is no uint8"),
        ({"data": planes(VAL[:2], 32)[:, :-3], "labels": [1, 2]}, "rows of 3069"),
        ({"data": planes(VAL[:2], 32), "labels": [1]}, "expected 2 integers"),
        ({"data": planes(VAL[:2], 32), "labels": [0, 1]}, "labels start at 0, expected 1 to 1000"),
        ({"data": planes(VAL[:2], 32), "labels": [1, 1001]}, "labels go from 1 to 1001"),
        ({"data": print, "labels": [1]}, "refused to load"),
    ],
)
def test_foreign_files(tmp_path: Path, content: dict, message: str) -> None:
    path = tmp_path / "val_data"
    path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UserError, match=rf"val_data: .*{message}"):
        read_batch(path)


# the class list


def test_shipped_tables_belong_together() -> None:
    assert len(ROWS) == len(PARENTS) == 1000
    assert {wnid for wnid, _ in ROWS} == set(PARENTS)
    ids, names = superclasses(class_list())
    assert len(names) == 127 and ids.shape == (1000,)
    children = Counter(ids.tolist())
    assert sorted(children.values(), reverse=True)[:6] == [218, 124, 92, 59, 57, 47]
    assert sum(n == 1 for n in children.values()) == 65
    largest = max(children, key=lambda k: children[k])
    assert names[largest] == "n01861778 (tusker +217)"
    for (wnid, _), k in zip(ROWS, ids, strict=True):
        assert names[k].startswith(PARENTS[wnid] + " (")


def test_class_list_in_two_formats(tmp_path: Path) -> None:
    rows = ROWS[::-1]
    as_json = tmp_path / "list.json"
    as_json.write_text(json.dumps(rows))
    as_text = tmp_path / "map_clsloc.txt"
    lines = [f"{wnid} {i} {name}" for i, (wnid, name) in enumerate(rows, start=1)]
    as_text.write_text("\n".join(lines[500:] + lines[:500]) + "\n")
    for path in (as_json, as_text):
        assert class_list(path).names == tuple(name for _, name in rows)
    ids, names = superclasses(class_list(as_text))
    np.testing.assert_array_equal(ids[::-1], superclasses(class_list())[0])
    assert names == superclasses(class_list())[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n02119789 1 kit_fox\n", "1 rows with 1 different classes, expected 1000"),
        ("n02119789 2 kit_fox\n", "its numbers are not 1, 2, 3"),
        ("kit_fox 1 kit_fox\n", "'kit_fox' is no WordNet id"),
        ("one two\n", "neither a JSON list"),
        ('["n02119789"', "neither a JSON list"),
        (json.dumps([ROWS[0]] * 1000), "1000 rows with 1 different classes"),
        (json.dumps([["n00000001", "strange"], *ROWS[1:]]), "n00000001 is not one of the 1000"),
        (None, "No such file"),
    ],
)
def test_other_class_lists(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "list"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf"data\.class_list.*{message}"):
        superclasses(class_list(path))


# 127 classes


@pytest.fixture(scope="module")
def merged(tmp_path_factory: pytest.TempPathFactory) -> ArrayDataset:
    """Seven to nine images of each of the 1000 classes, two validation images."""
    root = tmp_path_factory.mktemp("small_imagenet")
    write_small_imagenet(root, root, 7 + np.arange(1000) % 3, VAL)
    return load("small_imagenet_127", root, labeled_fraction=0.1)


def test_labels_names_test_and_priors_are_aligned(merged: ArrayDataset) -> None:
    """Every image says which class of the files it was; all else must follow from that."""
    assert merged.test_images is not None and merged.test_labels is not None
    for images, labels in (
        (merged.images, merged.labels),
        (merged.test_images, merged.test_labels),
    ):
        wnids = [ROWS[label - 1][0] for label in spelled(images)]
        for wnid, label in zip(wnids, labels, strict=True):
            assert merged.class_names[label].startswith(PARENTS[wnid] + " ")
    data = load_config("small_imagenet_127/32").data
    split = make_split(data, merged, seed=1)
    by_parent = Counter(PARENTS[ROWS[label - 1][0]] for label in spelled(merged.images))
    for k, name in enumerate(merged.class_names):
        images = by_parent[name.split()[0]]
        assert split.labeled_counts[k] == round(0.1 * images)
        assert split.unlabeled_counts is not None
        assert split.unlabeled_counts[k] == images - round(0.1 * images)
        own = np.flatnonzero(merged.labels == k)
        first = split.labeled[merged.labels[split.labeled] == k]
        assert first.tolist() == own[: len(first)].tolist()
    assert list(split.labeled_counts) == sorted(split.labeled_counts, reverse=True)
    assert merged.class_names[0].startswith("n01861778 ")
    method = build_method(
        load_config("small_imagenet_127/32").method, setting(split.labeled_counts)
    )
    counts = torch.bincount(torch.from_numpy(merged.labels[split.labeled]), minlength=127).double()
    torch.testing.assert_close(method.phi, counts / counts.sum())


def test_equal_sizes_keep_the_order_of_their_ids(merged: ArrayDataset) -> None:
    split = make_split(load_config("small_imagenet_127/32").data, merged, seed=1)
    ids = [name.split()[0] for name in merged.class_names]
    pairs = list(zip([-n for n in split.labeled_counts], ids, strict=True))
    assert pairs == sorted(pairs)


def test_merged_files_are_noticed(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 1, VAL[:5])
    for i in range(1, 11):
        write_batch(tmp_path / f"train_data_batch_{i}", np.arange(1, 128), 32)
    with pytest.raises(UserError, match="no label in the training files is above 127"):
        load("small_imagenet_127", tmp_path)


def test_a_class_too_small_for_a_tenth(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 5, VAL[:5])
    dataset = load("small_imagenet_127", tmp_path, labeled_fraction=0.1)
    with pytest.raises(
        ConfigError,
        match=r"data\.labeled_fraction=0\.1 leaves no labeled image for class 62 \(n.*\), "
        r"65 of 127 classes in all; use another fraction or more images, or data\.allow_empty",
    ):
        make_split(load_config("small_imagenet_127/32").data, dataset, 1)


# splits


def no_images(sizes: list[int]) -> ArrayDataset:
    return make_dataset(sizes, test_sizes=[50] * len(sizes))


def test_imagenet_1k_lt_counts() -> None:
    config = load_config("small_imagenet_1k/32")
    split = make_split(config.data, no_images([1300] * 1000), seed=1)
    assert split.labeled_counts[:5] == (256, 254, 253, 251, 250)
    assert split.labeled_counts[-5:] == (1,) * 5 and split.labeled_counts.count(1) == 125
    assert split.unlabeled_counts is not None
    assert split.unlabeled_counts[:5] == (1024, 1018, 1012, 1007, 1001)
    assert split.unlabeled_counts[-5:] == (4,) * 5
    assert (len(split.labeled), len(split.unlabeled)) == (45_589, 184_264)
    assert len(split.test) == 50_000
    data = config.data
    alpha = resolve_alpha(config.method, 45_589, 184_264, data.batch_size, data.mu)
    assert alpha == pytest.approx(1424 / 2879)


def test_head_classes_with_fewer_images_are_used_as_they_are(
    caplog: pytest.LogCaptureFixture,
) -> None:
    data = load_config("small_imagenet_1k/32").data
    with caplog.at_level(logging.WARNING):
        make_split(data, no_images([1280] * 1000), seed=1)
        assert not caplog.records
        split = make_split(data, no_images([732, 1300, 1000, *[1300] * 997]), seed=1)
    assert "2 of 1000 classes hold fewer" in caplog.text
    assert "class 0, name0: 1280 wanted, 732 found" in caplog.text
    assert split.labeled_counts[:3] == (256, 254, 253)
    assert split.unlabeled_counts is not None
    assert split.unlabeled_counts[:3] == (732 - 256, 1018, 1000 - 253)
    assert len(split.unlabeled) == sum(split.unlabeled_counts)
    with pytest.raises(ConfigError, match=r"class 0 \(name0\): 256 labeled .* 100 found; lower"):
        make_split(data, no_images([100, *[1300] * 999]), seed=1)


def test_a_tenth_is_rounded_half_to_even() -> None:
    data = load_config("small_imagenet_127/32").data
    split = make_split(data, no_images([75, 65, 45, 26, 25, 15]), seed=1)
    assert split.labeled_counts == (8, 6, 4, 3, 2, 2)
    assert split.unlabeled_counts == (67, 59, 41, 23, 23, 13)


def test_balanced_test_subset_is_the_same_for_every_seed() -> None:
    dataset = make_dataset([20, 20, 20], test_sizes=[218, 60, 40])
    data = toy_config(test_per_class=50)
    splits = [make_split(data, dataset, seed) for seed in (1, 2, 3)]
    assert splits[0].test_counts == (50, 50, 40)
    assert len({split.test.tobytes() for split in splits}) == 1
    test = splits[0].test
    assert (np.diff(test) > 0).all()
    assert test[:50].tolist() != list(range(50)), "not the first ones, which may be of one child"
    # what is left out of the class with images 218 to 277; other numbers would be another test
    left_out = [219, 220, 221, 249, 250, 253, 254, 260, 264, 270]
    assert sorted(set(range(218, 278)) - set(test.tolist())) == left_out
    assert make_split(toy_config(), dataset, 1).test_counts == (218, 60, 40)
