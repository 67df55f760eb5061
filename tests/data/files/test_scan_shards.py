"""Samples of tar shards: grouped, labelled, listed as rows of the manifest."""

from __future__ import annotations

import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

from simpro_fast.data.files.manifest import Manifest, read_manifest, write_manifest
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.files.scan_shards import expand, scan_shard
from simpro_fast.data.files.skipped import (
    FURTHER,
    HIDDEN,
    LONELY,
    NO_IMAGE,
    SHARD_OUTSIDE,
    TAKEN,
    Ignored,
)
from simpro_fast.utils.errors import UserError
from tests.data.image_folders import tidy
from tests.data.tar_shards import as_shards, jpeg, refusal, scan_members, write_tar


def test_samples_are_grouped_by_key(tmp_path: Path) -> None:
    members = [
        ("a/0001.jpg", jpeg(1)),
        ("a/0001.cls", b"7\n"),
        ("a/0001.json", b"{}"),
        ("b/0001.seg.png", b"mask"),
        ("b/0001.JPG", jpeg(2)),
        ("b/0001.txt", b"grey owl"),
        ("c.left.webp", b"x"),
        ("c.cls", b" 007"),
        ("notes.txt", b"made by hand"),
        ("README", b"hello"),
        ("a/._0001.jpg", b"mac"),
        (".cache/z.jpg", b"mac"),
    ]
    path = write_tar(tmp_path / "x.tar", members)
    found, ignored = scan_members(path, "labeled")
    assert found == ["a/0001.jpg 7", "b/0001.JPG grey owl", "c.left.webp 7"]
    assert ignored.counts == {FURTHER: 1, LONELY: 1, NO_IMAGE: 1, HIDDEN: 2}
    assert scan_members(path)[0] == ["a/0001.jpg", "b/0001.JPG", "c.left.webp"], (
        "labels of unlabeled ones unread"
    )


@pytest.mark.parametrize(
    ("members", "part"),
    [
        ([("1.jpg", b"x")], "member 1.jpg: has no label; add a member .cls"),
        ([("1.jpg", b"x"), ("1.cls", b"")], "member 1.cls: is not the name or number"),
        ([("1.jpg", b"x"), ("1.cls", b"a\nb")], "member 1.cls: is not the name or number"),
        ([("1.jpg", b"x"), ("1.cls", b"\xff\xfe")], "member 1.cls: is not the name or number"),
        ([("1.jpg", b"x"), ("1.cls", b"a" * 201)], "member 1.cls: is not the name or number"),
        ([("1.jpg", b"x"), ("1.cls", b"-1")], "member 1.cls: -1 is no class"),
        ([("1.jpg", b"x"), ("1.png", b"x")], "member 1.png: a second image .* beside '1.jpg'"),
        ([("1.jpg", b"x"), ("1.jpg", b"y")], "member 1.jpg: occurs twice"),
        ([("1.jpg\n\x1b[31m", b"x")] * 2, r"member 1.jpg\\n\\x1b\[31m: occurs twice"),
    ],
)
def test_sample_that_is_no_labeled_image_is_named(
    tmp_path: Path, members: list[tuple[str, bytes]], part: str
) -> None:
    path = write_tar(tmp_path / "x.tar", members)
    with pytest.raises(UserError, match=f"^{path} {part}") as caught:
        scan_shard(str(path), "labeled", Ignored())
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, b"Z"]
)
def test_links_and_devices_are_refused_by_name(tmp_path: Path, kind: bytes) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("readme.md", "0001.jpg"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert f"{path} member 0001.jpg: a link, device or sparse file; " in refusal(
        lambda: scan_members(path)
    )


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_members_are_refused(tmp_path: Path, form: str) -> None:
    with (tmp_path / "0001.jpg").open("wb") as file:
        file.write(b"x" * 5000)
        file.truncate(1 << 21)
    command = ["tar", f"--format={form}", "--sparse", "-cf", "x.tar", "0001.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert "a link, device or sparse file; " in refusal(lambda: scan_members(tmp_path / "x.tar"))


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8, 12):
        write_tar(tmp_path / f"photos-{i:04}.tar", [])
    (tmp_path / "photos").mkdir()
    (tmp_path / "odd{1,2}").mkdir()

    def names(pattern: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in expand(tmp_path / pattern)]

    assert names("photos-{0008..0010}.tar") == [f"photos-{i:04}.tar" for i in (8, 9, 10)]
    assert names("photos-00{08,11}.tar") == ["photos-0008.tar", "photos-0011.tar"]
    assert names("photos-*.tar") == [f"photos-{i:04}.tar" for i in range(8, 12)]
    assert names("photos-00{10..11,08}.tar") == ["photos-0010..11.tar", "photos-0008.tar"]
    assert names("odd{1,2}") == ["odd{1,2}"], "what exists is meant"
    assert "nothing matches" in refusal(lambda: expand(tmp_path / "photos-*.tat"))
    assert "is empty" in refusal(lambda: expand(tmp_path / "photos-{5..2}.tar"))
    (tmp_path / "x.zip").touch()
    assert "neither a folder nor an uncompressed .tar" in refusal(
        lambda: expand(tmp_path / "x.zip")
    )
    (tmp_path / "x.tgz").touch()
    assert "nor an uncompressed .tar" in refusal(lambda: expand(tmp_path / "x.tgz"))
    for url in ("https://host/x.tar", "s3://bucket/{0..9}.tar", "gs://b/x", "pipe:cat x.tar"):
        said = refusal(lambda url=url: expand(Path(url)))  # type: ignore[misc]
        assert said.startswith(f"{url}: ") and "mount or copy it" in said


def shards(root: Path, target: Path) -> tuple[Manifest, Ignored]:
    as_shards(root, target)
    return scan_folders(
        target / "labeled-{000..001}.tar", [target / "unlabeled-*.tar"], target / "val-000.tar"
    )


def test_shards_list_what_folders_list(tmp_path: Path) -> None:
    root = tidy(tmp_path / "data")
    from_files, _ = scan_folders(root / "labeled", [root / "unlabeled"], root / "val")
    from_shards, ignored = shards(root, tmp_path / "tars")
    assert not ignored.counts and from_shards.class_names == from_files.class_names
    for row, file in zip(from_shards.rows, from_files.rows, strict=True):
        assert (row.label, row.split) == (file.label, file.split)
        assert row.image.read_bytes() == Path(file.path).read_bytes()
    assert from_shards.base == tmp_path / "tars"


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_manifest_of_shards(tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    manifest, _ = shards(tidy(tmp_path / "data"), tmp_path / "tars")
    path = tmp_path / "tars" / f"m.{ending}"
    write_manifest(manifest, path)
    assert read_manifest(path) == manifest
    if ending == "csv":
        first = path.read_text().splitlines()[:2]
        assert first[0] == "path,label,split,width,height,bytes,sha256,status,member,offset"
        assert first[1].startswith("labeled-000.tar,cats,labeled,0,0,")
        path.write_text("path,label,member\nlabeled-000.tar,cats,cats/0.jpg\n")
        assert "both its member and its offset" in refusal(lambda: read_manifest(path))


def test_fingerprint_of_shards_follows_members_and_contents(tmp_path: Path) -> None:
    def fingerprint(place: str, members: list[tuple[str, bytes]], form: int) -> str:
        write_tar(tmp_path / place / "h.tar", members, form=form)
        write_tar(
            tmp_path / place / "l.tar",
            [(f"{i}.{e}", b"%d" % i) for i in range(2) for e in ("png", "cls")],
        )
        return scan_folders(tmp_path / place / "l.tar", [tmp_path / place / "h.tar"])[
            0
        ].fingerprint()

    first = fingerprint("a", [("ü1.jpg", b"x"), ("2.jpg", b"y")], tarfile.PAX_FORMAT)
    assert fingerprint("b", [("ü1.jpg", b"x"), ("2.jpg", b"y")], tarfile.GNU_FORMAT) == first
    assert fingerprint("c", [("ü1.jpg", b"x")], tarfile.PAX_FORMAT) != first
    assert fingerprint("d", [("ü1.jpg", b"x"), ("3.jpg", b"y")], tarfile.PAX_FORMAT) != first


def test_shards_and_folders_beside_each_other(tmp_path: Path) -> None:
    """What lies where it does not belong is counted, not used."""
    root = tidy(tmp_path / "data")
    tars = as_shards(root, tmp_path / "tars")
    shutil.copy(tars / "labeled-000.tar", root / "labeled")
    shutil.copy(tars / "labeled-000.tar", root / "labeled/cats/inside.tar")
    shutil.copy(tars / "unlabeled-000.tar", root / "unlabeled/more.tar")
    (root / "unlabeled/old.tar.gz").touch()
    (tmp_path / "shards").mkdir()
    for path in tars.glob("labeled-*.tar"):
        shutil.copy(path, tmp_path / "shards")
    manifest, ignored = scan_folders(root / "labeled", [root / "unlabeled"])
    assert ignored.counts == {SHARD_OUTSIDE: 2, NO_IMAGE: 1}
    assert sum(bool(row.member) for row in manifest.rows) == 8
    assert len(manifest.rows) == 12 + 24 + 8
    manifest, ignored = scan_folders(tmp_path / "shards", [root / "unlabeled", tmp_path / "shards"])
    assert ignored.counts == {TAKEN: 2, NO_IMAGE: 1}
    assert [row.label for row in manifest.rows if row.split == "labeled"].count("cats") == 5
    (tmp_path / "only").mkdir()
    (tmp_path / "only/x.tar.gz").touch()
    said = refusal(lambda: scan_folders(root / "labeled", [tmp_path / "only"]))
    assert "no unlabeled image found (ignored: 1 not an image" in said


def test_shards_of_one_class_or_of_nothing(tmp_path: Path) -> None:
    one = write_tar(tmp_path / "one.tar", [("1.jpg", b"x"), ("1.cls", b"7")])
    two = write_tar(
        tmp_path / "two.tar", [(f"{i}.{e}", b"%d" % i) for i in (1, 2) for e in ("jpg", "cls")]
    )
    empty = write_tar(tmp_path / "empty.tar", [("1.json", b"{}")])
    assert f"{one}: only the class 7; " in refusal(lambda: scan_folders(one, [two]))
    assert f"{empty}: no class folder and no" in refusal(lambda: scan_folders(empty, [two]))
    said = refusal(lambda: scan_folders(two, [empty]))
    assert f"{empty}: no unlabeled image found (ignored: 1 sample of a tar without" in said
    said = refusal(lambda: scan_folders(two, [one], empty))
    assert f"{empty}: no image" in said


def test_numbers_as_classes_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    members = [(f"{i}.{e}", b"%d" % i) for i in (10, 9, 100) for e in ("jpg", "cls")]
    write_tar(tmp_path / "l.tar", members)
    write_tar(tmp_path / "u.tar", [("1.jpg", b"x")])
    manifest, _ = scan_folders(tmp_path / "l.tar", [tmp_path / "u.tar"])
    assert manifest.class_names == ("9", "10", "100")
