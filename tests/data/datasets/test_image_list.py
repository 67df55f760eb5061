"""A user's images as a data set: the list, the split, and what is refused."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpro_fast.cli import prepare
from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.crops import Square
from simpro_fast.data.datasets.image_list import (
    FileImages,
    ImageListDataset,
    load_own_images,
    select,
)
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.files.square import row_square
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.image_folders import cut, picture, save, tidy


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tidy(tmp_path / "data")


def config(root: Path, **changes: Any) -> DataConfig:
    folders = {"labeled": root / "labeled", "unlabeled": root / "unlabeled", "val": root / "val"}
    if "manifest" in changes:
        folders = {}
    return DataConfig(**{"name": "images", "image_size": 16, **folders, **changes})


def load(root: Path, **changes: Any) -> tuple[ImageListDataset, Split]:
    data = config(root, **changes)
    dataset = load_dataset(data)
    assert isinstance(dataset, ImageListDataset)
    return dataset, make_split(data, dataset, 1)


def prepared(root: Path, *arguments: str) -> Path:
    folders = ["--labeled", f"{root}/labeled", "--unlabeled", f"{root}/unlabeled"]
    folders += ["--val", f"{root}/val", "--output", f"{root}/out"]
    assert prepare.main([*folders, *arguments]) == 0
    return root / "out/manifest.csv"


def names(dataset: ImageListDataset, root: Path, indices: np.ndarray) -> list[str]:
    return [os.path.relpath(dataset.manifest.rows[i].path, root) for i in indices]


def test_folders(root: Path) -> None:
    dataset, split = load(root)
    assert dataset.class_names == ("cats", "dogs", "owls")
    assert split.labeled_counts == (5, 4, 3) and split.test_counts == (2, 2, 2)
    assert split.unlabeled_counts is None, "the truth of the unlabeled set is unknown"
    for part, folder in ((split.labeled, "labeled"), (split.test, "val")):
        for i, name in zip(part, names(dataset, root, part), strict=True):
            assert name.split("/")[:2] == [folder, dataset.class_names[dataset.labels[i]]]
    assert all(n.startswith("unlabeled/") for n in names(dataset, root, split.unlabeled))
    assert (dataset.labels[split.unlabeled] == -1).all() and len(split.unlabeled) == 24
    assert not split.overlap


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_manifest_gives_the_same_set(root: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    from_folders, split = load(root)
    manifest = prepared(root, "--format", ending).with_suffix(f".{ending}")
    from_manifest, same = load(root, manifest=manifest)
    assert same.hash() == split.hash()
    assert [r.path for r in from_manifest.manifest.rows] == [
        r.path for r in from_folders.manifest.rows
    ]
    for row, other in zip(from_manifest.manifest.rows, from_folders.manifest.rows, strict=True):
        assert (row.width, row.height, row.bytes) == (other.width, other.height, other.bytes)


def test_fingerprint_notices_another_list(root: Path) -> None:
    before = load(root)[0].fingerprint()
    assert load(root)[0].fingerprint() == before
    shutil.copytree(root, root.parent / "moved")
    assert load(root.parent / "moved")[0].fingerprint() == before
    (root / "unlabeled/007.jpg").unlink()
    assert load(root)[0].fingerprint() != before


def test_labels_of_unlabeled_images_serve_reports(root: Path, tmp_path: Path) -> None:
    lines = ["path,label,split"]
    for i in range(6):
        lines.append(f"data/unlabeled/{i:03}.jpg,{('cats', 'dogs')[i % 2]},labeled")
    for i in range(6, 12):
        lines.append(f"data/unlabeled/{i:03}.jpg,cats,unlabeled")
    path = tmp_path / "m.csv"
    path.write_text("\n".join(lines))
    _, split = load(root, manifest=path)
    assert split.unlabeled_counts == (6, 0)
    path.write_text("\n".join([*lines, "data/unlabeled/012.jpg,,"]))
    assert load(root, manifest=path)[1].unlabeled_counts is None


def test_held_out_images(root: Path) -> None:
    shutil.rmtree(root / "val")
    dataset, split = load(root, val=None)
    assert len(split.test) == 0 and split.labeled_counts == (5, 4, 3)
    data = config(root, val=None, holdout_per_class=2)
    split = make_split(data, dataset, 1)
    assert split.labeled_counts == (3, 2, 1) and split.test_counts == (2, 2, 2)
    assert not set(split.labeled) & set(split.test)
    assert len(set(split.labeled) | set(split.test)) == 12
    assert make_split(data, dataset, 2).hash() == split.hash(), "the same for every seed"
    taken = names(dataset, root, split.test)
    assert taken != sorted(names(dataset, root, np.union1d(split.labeled, split.test)))[:6]
    wide = make_split(config(root, val=None, holdout_per_class=9), dataset, 1)
    assert wide.labeled_counts == (1, 1, 1) and wide.test_counts == (4, 3, 2)


def test_a_class_of_one_image_stays_untested_and_is_named(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.rmtree(root / "val")
    _, *others = sorted((root / "labeled" / "owls").iterdir())
    for path in others:
        path.unlink()
    split = load(root, val=None, holdout_per_class=2)[1]
    assert split.labeled_counts == (3, 2, 1) and split.test_counts == (2, 2, 0)
    assert "no test image for 'owls'" in caplog.text


def test_val_and_holdout_exclude_each_other(root: Path) -> None:
    with pytest.raises(ConfigError, match="6 val images already"):
        load(root, holdout_per_class=1)


def test_overlap_puts_the_labeled_images_among_the_unlabeled(root: Path) -> None:
    _, split = load(root, overlap=True)
    assert split.overlap and len(split.unlabeled) == 36
    assert set(split.labeled) < set(split.unlabeled) and split.unlabeled_counts is None


def test_class_without_labeled_images(root: Path) -> None:
    shutil.rmtree(root / "labeled/owls")
    (root / "labeled/owls").mkdir()
    with pytest.raises(ConfigError, match="'owls' has no labeled image"):
        load(root)
    assert load(root, allow_empty_classes=True)[1].labeled_counts == (5, 4, 0)


@pytest.mark.parametrize(
    ("rows", "part"),
    [
        (["001.jpg,a,", "002.jpg,b,"], "no usable unlabeled image"),
        (["001.jpg,a,val", "002.jpg,b,val", "003.jpg,,"], "class 'a' has no labeled image"),
        (["001.jpg,a,", "002.jpg,,"], "only the class 'a'"),
        ([], "no labeled image; at least two classes"),
    ],
)
def test_empty_parts_of_a_manifest(root: Path, rows: list[str], part: str) -> None:
    path = root / "unlabeled/m.csv"
    path.write_text("\n".join(["path,label,split", *rows]))
    with pytest.raises(UserError, match=part) as caught:
        load(root, manifest=path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("change", ["gone", "longer"])
def test_files_that_changed_since_prepare_are_named(root: Path, change: str) -> None:
    manifest = prepared(root)
    victim = root / "unlabeled/005.jpg"
    if change == "gone":
        victim.unlink()
    else:
        save(victim, picture(999, 90, 80))
    for mode in ("error", "skip"):
        with pytest.raises(UserError, match=f"{victim}: .*run simpro-fast prepare") as caught:
            load(root, manifest=manifest, on_bad_image=mode)
        assert ("No such file" if change == "gone" else "changed") in str(caught.value)


def test_headers_are_looked_at_where_nothing_was_prepared(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(root / "unlabeled/x.gif", picture(1))
    (root / "labeled/cats/note.jpg").write_text("no picture")
    with pytest.raises(UserError, match=r"note\.jpg: damaged"):
        load(root)
    (root / "unlabeled/dangling.jpg").symlink_to(root / "nowhere.jpg")
    dataset, split = load(root, on_bad_image="skip")
    assert split.labeled_counts == (5, 4, 3) and len(split.unlabeled) == 24
    assert "dangling.jpg: unreadable" in caplog.text
    assert "left out: 3 of 45 images" in caplog.text
    (root / "labeled/cats/note.jpg").unlink()
    (root / "unlabeled/x.gif").unlink()
    with pytest.raises(UserError, match=r"dangling\.jpg: unreadable.* data\.on_bad_image=skip,"):
        load(root)
    assert not any("x.gif" in row.path for row in dataset.manifest.rows)


def test_skipped_files_of_a_manifest_are_not_used(root: Path) -> None:
    cut(root / "labeled/cats/cut.jpg", root / "labeled/cats/0.jpg")
    _, split = load(root, manifest=prepared(root, "--on-bad-image", "skip"))
    assert split.labeled_counts == (5, 4, 3)


def test_image_size_is_asked_for(root: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.image_size"):
        load(root, image_size=None)


def test_packed_array(root: Path) -> None:
    manifest = prepared(root, "--pack", "16")
    packed = root / "out/packed_16.npy"
    in_files, split = load(root, manifest=manifest)
    in_memory, same = load(root, manifest=manifest, packed=packed, image_size=None)
    assert in_files.in_files and not in_memory.in_files
    assert in_memory.image_size == 16 and same.hash() == split.hash()
    assert in_memory.fingerprint() == in_files.fingerprint()
    everything = np.arange(42)
    assert np.array_equal(in_memory.images, in_files.images[everything])
    with pytest.raises(UserError, match=r"holds 16 px images, data\.image_size=32"):
        load(root, manifest=manifest, packed=packed, image_size=32)
    for key, value in (("fit", "pad"), ("interpolation", "bicubic")):
        with pytest.raises(UserError, match=rf"packed with {key} .* run prepare .*--pack 16"):
            load(root, manifest=manifest, packed=packed, **{key: value})
    save(root / "unlabeled/new.jpg", picture(5))
    prepared(root)
    with pytest.raises(UserError, match="made of another manifest"):
        load(root, manifest=manifest, packed=packed)
    packed.write_bytes(packed.read_bytes()[:-100])
    with pytest.raises(UserError, match="run prepare --pack again"):
        load(root, manifest=manifest, packed=packed)


def test_file_images_behave_like_an_array(root: Path) -> None:
    dataset, split = load(root)
    images: Any = dataset.images
    assert images.shape == (42, 16, 16, 3) and len(images) == 42
    some = images[[3, 1, 3]]
    assert some.dtype == np.uint8 and np.array_equal(some[0], some[2])
    assert np.array_equal(some[1], row_square(images.rows[1], Square(16)))
    assert np.array_equal(images[1:4], images[np.array([1, 2, 3])])
    subset = select(dataset.images, split.test)
    assert isinstance(subset, FileImages) and len(subset) == 6
    assert np.array_equal(subset[2:4], images[split.test[2:4]])
    cut(Path(images.rows[0].path), Path(images.rows[0].path))
    with pytest.raises(
        UserError, match=f"{images.rows[0].path}: damaged: .*; restore it, .*or run"
    ):
        load_own_images(config(root)).images[[0]]
