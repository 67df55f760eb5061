"""ImageNet from its JPEG tree: class numbers, splits, what is missing, a few training steps."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from simpro_fast.cli import prepare
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.image_list import FileImages
from simpro_fast.data.datasets.imagenet import ImageNetTree, load_imagenet
from simpro_fast.data.datasets.imagenet_classes import class_list
from simpro_fast.data.splits.build import make_split
from simpro_fast.utils.errors import ConfigError, UserError
from tests.conftest import ROOT
from tests.data.imagenet_tree_format import write_imagenet_tree

PER_CLASS = 3


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All 1000 folders; every class has the same few pictures, which is no fault here."""
    return write_imagenet_tree(tmp_path_factory.mktemp("imagenet"), PER_CLASS)


def config(tree: Path, **changes: Any) -> DataConfig:
    values = {"name": "imagenet_1k", "root": tree, "image_size": 16, "labeled_fraction": 0.5}
    return DataConfig(**{**values, "total_max": 2, "gamma_labeled": 1.0, **changes})


def test_classes_are_numbered_as_in_the_downsampled_files(tree: Path) -> None:
    dataset = load_imagenet(config(tree))
    wnids = class_list().wnids
    assert list(wnids) != sorted(wnids), "else the test would prove nothing"
    for images, labels, per_class in (
        (dataset.images, dataset.labels, PER_CLASS),
        (dataset.test_images, dataset.test_labels, 1),
    ):
        assert isinstance(images, FileImages) and labels is not None
        assert np.bincount(labels).tolist() == [per_class] * 1000
        assert [wnids[k] for k in labels] == [Path(row.path).parent.name for row in images.rows]
    assert dataset.class_names == class_list().names


def test_split_takes_the_first_images_of_each_class(tree: Path) -> None:
    data = config(tree)
    dataset = load_imagenet(data)
    split = make_split(data, dataset, 1)
    assert split.labeled_counts == split.unlabeled_counts == (1,) * 1000
    assert len(split.test) == 1000
    for part, i in ((split.labeled, 0), (split.unlabeled, 1)):
        assert {dataset.manifest.rows[k].path.rpartition("_")[2] for k in part} == {f"{i}.JPEG"}


def test_127_parents_stay_with_their_names(tree: Path) -> None:
    data = config(tree, name="imagenet_127", total_max=None, labeled_fraction=0.34)
    dataset = load_imagenet(data)
    tables = ROOT / "simpro_fast/data/datasets/imagenet_lists"
    parents = json.loads((tables / "imagenet127_wnid_map.json").read_text())
    for images, labels in (
        (dataset.images, dataset.labels),
        (dataset.test_images, dataset.test_labels),
    ):
        assert isinstance(images, FileImages) and labels is not None
        for row, k in zip(images.rows, labels, strict=True):
            assert dataset.class_names[k].split()[0] == parents[Path(row.path).parent.name]
    counts = make_split(data, dataset, 1).labeled_counts
    assert list(counts) == sorted(counts, reverse=True), "head first"


def test_manifest_of_prepare_gives_the_same_set(
    tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "imagenet.yaml"
    keys = {"labeled_fraction": 0.5, "total_max": 2, "gamma_labeled": 1.0}
    path.write_text(yaml.safe_dump({"name": "x", "data": {"name": "imagenet_1k", **keys}}))
    arguments = ["--config", str(path), f"data.root={tree}", "--output", f"{tmp_path}/out"]
    assert prepare.main(arguments) == 0
    said = capsys.readouterr().out
    assert "1000 classes, 3000 labeled, 0 unlabeled, 1000 val images" in said
    assert "and 900 more" in said
    plain = load_imagenet(config(tree))
    listed = load_imagenet(config(tree, manifest=tmp_path / "out/manifest.csv"))
    assert isinstance(listed, ImageNetTree)
    assert np.array_equal(plain.labels, listed.labels)
    assert [row.path for row in plain.manifest.rows] == [row.path for row in listed.manifest.rows]
    assert listed.manifest.rows[0].sha256 and not plain.manifest.rows[0].sha256
    assert plain.fingerprint() != listed.fingerprint(), "only one of them knows the contents"
    assert prepare.main([*arguments, "--pack", "8"]) == 2
    assert "own images" in capsys.readouterr().err


def test_missing_and_unknown_classes_are_named(tree: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no folder {tmp_path}/train; set data.root to"):
        load_imagenet(config(tmp_path))
    part = tmp_path / "part"
    for wnid in class_list().wnids[1:4]:
        for split in ("train", "val"):
            shutil.copytree(tree / split / wnid, part / split / wnid)
    first = class_list().wnids[0]
    with pytest.raises(UserError, match=f"no training image of {first} .*997 of 1000"):
        load_imagenet(config(part))
    shutil.copytree(part / "train" / class_list().wnids[1], part / "train/n99999999")
    with pytest.raises(UserError, match="n99999999 is not among the 1000"):
        load_imagenet(config(part))
    with pytest.raises(ConfigError, match="labeled is for own images"):
        from simpro_fast.config import parse_config

        parse_config({"name": "x", "data": {"name": "imagenet_1k", "labeled": "a"}})
