"""Names that differ in Unicode normalisation alone; folders too high."""

from __future__ import annotations

import os
import unicodedata
from pathlib import Path

import pytest

from simpro_fast.data.files.check import check_images, nothing_to_learn_from
from simpro_fast.data.files.decode import read_rgb
from simpro_fast.data.files.manifest import make_manifest, read_manifest, write_manifest
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.pipeline.file_graph import GraphDecoder
from simpro_fast.utils.errors import ConfigError, UserError
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import as_shards

NFC, NFD = (unicodedata.normalize(form, "käuze") for form in ("NFC", "NFD"))


def owls_become(root: Path, labeled: str, val: str) -> None:
    (root / "labeled/owls").rename(root / "labeled" / labeled)
    (root / "val/owls").rename(root / "val" / val)


@pytest.mark.parametrize(("labeled", "val"), [(NFC, NFD), (NFD, NFC), (NFD, NFD)])
@pytest.mark.parametrize("shards", [False, True])
def test_classes_travel_in_one_form_and_files_by_their_own(
    tmp_path: Path, labeled: str, val: str, shards: bool
) -> None:
    root = tidy(tmp_path, unlabeled=1)
    owls_become(root, labeled, val)
    if shards:
        tars = as_shards(root, tmp_path / "tars")
        manifest, ignored = scan_folders(
            tars / "labeled-*.tar", [root / "unlabeled"], tars / "val-*.tar"
        )
    else:
        manifest, ignored = scan_folders(root / "labeled", [root / "unlabeled"], root / "val")
    assert manifest.class_names == ("cats", "dogs", NFC)
    assert not ignored.notes
    owls = [row for row in manifest.rows if row.label == NFC]
    assert [row.split for row in owls] == ["labeled"] * 3 + ["val"] * 2
    for row in owls:
        read_rgb(row.image)
    write_manifest(manifest, tmp_path / "m.csv")
    again = read_manifest(tmp_path / "m.csv")
    assert again.rows == make_manifest(tmp_path, manifest.rows).rows


def test_list_in_another_form_than_the_folders(tmp_path: Path) -> None:
    """A list written on a Mac beside files on Linux, or the other way round: both are opened."""
    for number, (on_disk, listed) in enumerate(((NFC, NFD), (NFD, NFC))):
        save(tmp_path / f"{number}" / on_disk / f"{on_disk}.jpg", picture(number))
        (tmp_path / f"{number}.csv").write_text(
            f"path,label\n{number}/{listed}/{listed}.jpg,{listed}\n{number}/{listed}/gone.jpg,b\n"
        )
        manifest = read_manifest(tmp_path / f"{number}.csv")
        assert manifest.class_names == ("b", NFC)
        found = {row.label: row for row in manifest.rows}
        assert found[NFC].path == f"{tmp_path}/{number}/{on_disk}/{on_disk}.jpg"
        assert read_rgb(found[NFC].image).size == (44, 36)
        assert Path(found["b"].path).name == "gone.jpg"
    (tmp_path / "twice.csv").write_text(f"path\n0/{NFC}/{NFC}.jpg\n0/{NFD}/{NFD}.jpg\n")
    with pytest.raises(UserError, match=r"line 3: .* is listed twice"):
        read_manifest(tmp_path / "twice.csv")


def test_two_folders_of_one_class_are_told(tmp_path: Path) -> None:
    root = tidy(tmp_path, unlabeled=1)
    owls_become(root, NFC, NFD)
    save(root / "labeled" / NFD / "more.jpg", picture(77))
    manifest, ignored = scan_folders(root / "labeled", [root / "unlabeled"], root / "val")
    assert sum(row.label == NFC for row in manifest.rows) == 3 + 1 + 2
    (note,) = ignored.notes
    assert "are one class" in note and "NFC and NFD" in note


def test_class_of_val_is_named_with_what_was_meant(tmp_path: Path) -> None:
    root = tidy(tmp_path, unlabeled=1)
    (root / "val/owls").rename(root / "val/owl")
    with pytest.raises(ConfigError, match="did you mean 'owls'") as caught:
        scan_folders(root / "labeled", [root / "unlabeled"], root / "val")
    assert caught.value.exit_code == 2


def test_folder_one_level_too_high(tmp_path: Path) -> None:
    root = tidy(tmp_path / "photos", unlabeled=1)
    with pytest.raises(ConfigError, match=f"did you mean {root}/labeled\\?"):
        scan_folders(root, [root / "unlabeled"])
    with pytest.raises(ConfigError, match="labeled, unlabeled, val are parts of a data set"):
        scan_folders(root / "labeled", [root / "unlabeled"], root)


def test_classes_whose_names_hold_folders_of_their_own_stay(tmp_path: Path) -> None:
    """Nested class folders, and a class that is called like a part."""
    root = tidy(tmp_path, unlabeled=1)
    (root / "labeled/owls").rename(root / "labeled/train")
    save(root / "labeled/cats/deep/er/1.jpg", picture(5))
    manifest, _ = scan_folders(root / "labeled", [root / "unlabeled"])
    assert manifest.class_names == ("cats", "dogs", "train")


def test_class_of_a_list_that_only_val_has(tmp_path: Path) -> None:
    root = tidy(tmp_path, unlabeled=1)
    (root / "m.csv").write_text(
        "path,label,split\nlabeled/cats/0.jpg,cats,labeled\nlabeled/dogs/0.jpg,dogs,labeled\n"
        "val/cats/0.jpg,Cats,val\nunlabeled/000.jpg,,\n"
    )
    checked = check_images(
        read_manifest(root / "m.csv"),
        tmp_path / "cache",
        threads=1,
        progress=lambda done, total: None,
        new_decoder=GraphDecoder,
    )
    said = nothing_to_learn_from(checked)
    assert said is not None and "'Cats' has no usable" in said and "'cats'" in said


def test_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """A list could not be told from one that was saved in another encoding."""
    root = tidy(tmp_path)
    (root / "labeled" / "cats").rename(root / "labeled" / os.fsdecode(b"z\xe9ro"))
    with pytest.raises(UserError, match=r"z\\udce9ro: .* not UTF-8 .*'zéro'.* rename the folder"):
        scan_folders(root / "labeled", [root / "unlabeled"])
