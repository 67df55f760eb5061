"""Split files: written whole, checked on reading, and taken from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpro_fast.data.splits import build
from simpro_fast.data.splits.build import make_split
from simpro_fast.data.splits.split import load_split, save_split
from simpro_fast.utils.errors import UserError
from tests.data.toy_split import config, make_dataset


def test_saved_split_is_the_same_again(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16], test_sizes=[3, 3])
    split = make_split(config(), dataset, 1)
    save_split(split, tmp_path, dataset)
    again = load_split(tmp_path)
    for name in ("labeled", "unlabeled", "test"):
        np.testing.assert_array_equal(getattr(again, name), getattr(split, name))
    assert again.labeled_counts == split.labeled_counts
    assert again.unlabeled_counts == split.unlabeled_counts
    assert again.test_counts == split.test_counts
    described = json.loads((tmp_path / "split.json").read_text())
    assert described["hash"] == split.hash()
    assert described["class_names"] == ["name0", "name1"]
    assert described["labeled_counts"] == [4, 2]
    with np.load(tmp_path / "split.npz") as lists:
        assert {name: lists[name].dtype.str for name in lists} == {
            "labeled": "<i8",
            "unlabeled": "<i8",
            "test": "<i8",
        }
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split.json", "split.npz"]


def test_a_failed_write_leaves_the_old_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = make_dataset([16, 16], test_sizes=[3, 3])
    split = make_split(config(), dataset, 1)
    save_split(split, tmp_path, dataset)

    def fail(file: Any, **_: Any) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(build.np, "savez", fail)
    with pytest.raises(UserError, match="No space left"):
        save_split(split, tmp_path, dataset)
    assert load_split(tmp_path).hash() == split.hash()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["split.json", "split.npz"]


def test_files_that_do_not_belong_together(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16], test_sizes=[3, 3])
    save_split(make_split(config(), dataset, 1), tmp_path, dataset)
    described = (tmp_path / "split.json").read_text()
    save_split(make_split(config(unlabeled_distribution="reversed"), dataset, 1), tmp_path, dataset)
    (tmp_path / "split.json").write_text(described)
    with pytest.raises(UserError, match="do not belong together"):
        load_split(tmp_path)
    (tmp_path / "split.json").write_text(described[:40])
    with pytest.raises(UserError, match=r"split\.json is damaged"):
        load_split(tmp_path)
    (tmp_path / "split.json").unlink()
    with pytest.raises(UserError, match=r"split\.json: No such file"):
        load_split(tmp_path)


def write_lists(path: Path, **lists: Any) -> Path:
    np.savez(path, **{name: np.asarray(indices) for name, indices in lists.items()})
    return path


def test_split_file_is_used_as_it_is(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16], test_sizes=[3, 3])
    path = write_lists(tmp_path / "mine.npz", labeled=[30, 2, 7], unlabeled=[9, 1], test=[5, 0])
    split = make_split(config(split_file=path), dataset, 1)
    assert split.labeled.tolist() == [30, 2, 7]
    assert split.unlabeled.tolist() == [9, 1]
    assert split.test.tolist() == [5, 0]
    assert split.test_counts == (1, 1)
    assert split.labeled_counts == tuple(np.bincount(dataset.labels[[30, 2, 7]], minlength=2))
    path = write_lists(tmp_path / "whole_test.npz", labeled=[30, 2, 7], unlabeled=[9, 1])
    assert make_split(config(split_file=path), dataset, 1).test.tolist() == list(range(6))


def test_a_run_can_be_repeated_from_its_split_file(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16])
    split = make_split(config(test_per_class=3), dataset, 1)
    save_split(split, tmp_path, dataset)
    again = make_split(config(split_file=tmp_path / "split.npz"), dataset, 2)
    assert again.hash() == split.hash()
    assert again.unlabeled_counts == split.unlabeled_counts


LABELED_BOTH = [0, 1, 2, 3, 4, 5, 6, 7]  # 8 of 32 images: both classes are among them


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ({"labeled": LABELED_BOTH}, "has no list `unlabeled`"),
        ({"labeled": [0, 32], "unlabeled": [1]}, "labeled goes from 0 to 32, .* has 32 images"),
        ({"labeled": LABELED_BOTH, "unlabeled": [-1, 9]}, "unlabeled goes from -1 to 9"),
        ({"labeled": [3, 3, 1], "unlabeled": [9]}, "labeled holds image 3 more than once"),
        ({"labeled": LABELED_BOTH, "unlabeled": [9, 5]}, r"share 1 images \(first: 5\)"),
        ({"labeled": [0.5], "unlabeled": [9]}, "labeled is float64"),
        ({"labeled": [[0]], "unlabeled": [9]}, r"int64 \[1, 1\], expected a list"),
        ({"labeled": LABELED_BOTH, "unlabeled": []}, "need at least one image each"),
        ({"labeled": np.array([{}]), "unlabeled": [9]}, "not an npz file"),
    ],
)
def test_split_files_that_do_not_fit(tmp_path: Path, lists: dict, message: str) -> None:
    path = write_lists(tmp_path / "mine.npz", **lists)
    with pytest.raises(UserError, match=rf"mine\.npz: .*{message}"):
        make_split(config(split_file=path), make_dataset([16, 16], test_sizes=[3, 3]), 1)


def test_split_file_for_a_set_without_a_test_part(tmp_path: Path) -> None:
    data = config(split_file=tmp_path / "mine.npz")
    write_lists(tmp_path / "mine.npz", labeled=LABELED_BOTH, unlabeled=[9])
    with pytest.raises(UserError, match="needs a list `test`"):
        make_split(data, make_dataset([16, 16]), 1)
    write_lists(tmp_path / "mine.npz", labeled=LABELED_BOTH, unlabeled=[9], test=[9])
    with pytest.raises(UserError, match="unlabeled and test share 1 images"):
        make_split(data, make_dataset([16, 16]), 1)


def test_split_file_may_overlap_only_when_asked(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16], test_sizes=[3, 3])
    path = write_lists(tmp_path / "mine.npz", labeled=LABELED_BOTH, unlabeled=[9, 5])
    split = make_split(config(split_file=path, overlap=True), dataset, 1)
    assert split.unlabeled.tolist() == [9, 5]


def test_split_file_without_a_labeled_class(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16], test_sizes=[3, 3])
    zero, one = (np.flatnonzero(dataset.labels == k) for k in range(2))
    path = write_lists(tmp_path / "mine.npz", labeled=zero[:3], unlabeled=one)
    with pytest.raises(UserError, match=r"no labeled image of class 1 \(name1\)"):
        make_split(config(split_file=path), dataset, 1)
    allowed = make_split(config(split_file=path, allow_empty_classes=True), dataset, 1)
    assert allowed.labeled_counts == (3, 0)


def test_missing_and_foreign_split_files(tmp_path: Path) -> None:
    dataset = make_dataset([16, 16])
    with pytest.raises(UserError, match="no such split file"):
        make_split(config(split_file=tmp_path / "none.npz"), dataset, 1)
    for content in (b"", b"hello", b"PK\x03\x04 cut"):
        (tmp_path / "bad.npz").write_bytes(content)
        with pytest.raises(UserError, match=r"bad\.npz: not an npz file"):
            make_split(config(split_file=tmp_path / "bad.npz"), dataset, 1)
