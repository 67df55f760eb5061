"""Tar shards: found, read by offset, and refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpro_fast.data.ignored import (
    COMPRESSED,
    FURTHER,
    HIDDEN,
    LONELY,
    NO_IMAGE,
    SHARD_OUTSIDE,
    TAKEN,
    Ignored,
)
from simpro_fast.data.image_files import check_file, read_header, read_rgb
from simpro_fast.data.image_scan import scan_folders
from simpro_fast.data.manifest import Manifest, read_manifest, write_manifest
from simpro_fast.data.shard_scan import expand, scan_shard
from simpro_fast.data.tar_members import Member, tar_entries
from simpro_fast.errors import UserError
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import as_shards, write_tar

LONG = "a/" * 60 + "0001.jpg"


def jpeg(number: int) -> bytes:
    out = io.BytesIO()
    picture(number).save(out, "jpeg")
    return out.getvalue()


def refusal(function: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as caught:
        function()
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def scan(path: Path, split: str = "unlabeled") -> tuple[list[str], Ignored]:
    ignored = Ignored()
    rows = scan_shard(str(path), split, ignored)
    return [f"{row.member} {row.label}".strip() for row in rows], ignored


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_read_where_tarfile_finds_them(tmp_path: Path, form: int) -> None:
    """Every header form, long names and names that are no ASCII, against the standard library."""
    names = ["0001.jpg", "./b/0002.jpg", "ü/0003.jpg", LONG, "empty.jpg"]
    contents = [jpeg(i) for i in range(4)] + [b""]
    path = write_tar(tmp_path / "x.tar", zip(names, contents, strict=True), form=form)
    with tarfile.open(path) as tar:
        expected = [(info.name, info.offset_data, info.size) for info in tar]
    found = [(entry.name, entry.offset, entry.length) for entry in tar_entries(str(path))]
    assert found == expected and [name for name, _, _ in found] == names
    for (name, offset, length), content in zip(found, contents, strict=True):
        member = Member(str(path), name, offset, length)
        assert member.read_bytes() == content
        with member.open() as file:
            assert file.read() == content and file.seek(-3, os.SEEK_END) == max(length - 3, 0)
    picture_of = Member(str(path), *found[0])
    alone = save(tmp_path / "alone.jpg", picture(0))
    assert check_file(picture_of) == check_file(alone)
    assert read_header(picture_of) == read_header(alone)
    assert np.array_equal(np.asarray(read_rgb(picture_of)), np.asarray(read_rgb(alone)))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["gnu", "pax", "ustar", "v7"])
def test_what_the_tar_command_writes(tmp_path: Path, form: str) -> None:
    root = tidy(tmp_path, unlabeled=3)
    if form in ("gnu", "pax"):
        save(root / "unlabeled" / ("d" * 90) / ("f" * 90 + ".jpg"), picture(5))
    done = subprocess.run(
        ["tar", f"--format={form}", "-cf", "x.tar", "-C", "unlabeled", "."], cwd=root, check=False
    )
    assert done.returncode == 0
    members = {m.name.removeprefix("./"): m for m in _members(root / "x.tar")}
    files = [path for path in (root / "unlabeled").rglob("*") if path.is_file()]
    assert members.keys() == {str(f.relative_to(root / "unlabeled")) for f in files}
    for file in files:
        member = members[str(file.relative_to(root / "unlabeled"))]
        assert member.read_bytes() == file.read_bytes()


def _members(path: Path) -> list[Member]:
    rows = scan_shard(str(path), "unlabeled", Ignored())
    return [row.image for row in rows if isinstance(row.image, Member)]


def test_header_written_byte_by_byte(tmp_path: Path) -> None:
    """POSIX.1-1988 ustar with a prefix, and GNU's base-256 length."""

    def header(length: bytes, magic: bytes, prefix: bytes) -> bytes:
        block = bytearray(512)
        for start, value in (
            (0, b"0001.jpg"),
            (100, b"0000644\0"),
            (124, length),
            (136, b"00000000000\0"),
            (156, b"0"),
            (257, magic),
            (345, prefix),
        ):
            block[start : start + len(value)] = value
        block[148:156] = b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)

    posix = header(b"00000000003\0", b"ustar\x0000", b"some/where")
    gnu = header(b"\x80" + bytes(10) + b"\x03", b"ustar  \0", b"00000000000\0")
    data = b"abc" + bytes(509)
    (tmp_path / "x.tar").write_bytes(posix + data + gnu + data + bytes(1024))
    found = list(tar_entries(str(tmp_path / "x.tar")))
    assert [(e.name, e.offset, e.length) for e in found] == [
        ("some/where/0001.jpg", 512, 3),
        ("0001.jpg", 1536, 3),
    ]


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
    found, ignored = scan(path, "labeled")
    assert found == ["a/0001.jpg 7", "b/0001.JPG grey owl", "c.left.webp 7"]
    assert ignored.counts == {FURTHER: 1, LONELY: 1, NO_IMAGE: 1, HIDDEN: 2}
    assert scan(path)[0] == ["a/0001.jpg", "b/0001.JPG", "c.left.webp"], "labels of a heap unread"


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
    ("kind", "word"),
    [
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.FIFOTYPE, "pipe"),
        (b"Z", "special entry"),
    ],
)
def test_links_and_devices_are_refused_by_name(tmp_path: Path, kind: bytes, word: str) -> None:
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("readme.md", "0001.jpg"):
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
    assert f"{path} member 0001.jpg: a {word}; " in refusal(lambda: scan(path))


@pytest.mark.skipif(shutil.which("tar") is None, reason="needs tar")
@pytest.mark.parametrize("form", ["gnu", "pax"])
def test_sparse_members_are_refused(tmp_path: Path, form: str) -> None:
    with (tmp_path / "0001.jpg").open("wb") as file:
        file.write(b"x" * 5000)
        file.truncate(1 << 21)
    command = ["tar", f"--format={form}", "--sparse", "-cf", "x.tar", "0001.jpg"]
    subprocess.run(command, cwd=tmp_path, check=True)
    assert "a sparse file; " in refusal(lambda: scan(tmp_path / "x.tar"))


def test_names_never_become_paths(tmp_path: Path) -> None:
    outside = tmp_path / "outside.jpg"
    names = ["../outside.jpg", str(outside), "a/../../outside2.jpg"]
    path = write_tar(tmp_path / "in/x.tar", [(name, jpeg(i)) for i, name in enumerate(names)])
    before = sorted(tmp_path.rglob("*"))
    members = _members(path)
    assert [check_file(member).status for member in members] == ["ok"] * 3
    assert sorted(tmp_path.rglob("*")) == before and not outside.exists()


def test_broken_shards_are_named(tmp_path: Path) -> None:
    members = [(f"{i:04}.jpg", jpeg(i)) for i in range(4)]
    good = write_tar(tmp_path / "good.tar", members).read_bytes()
    entries = list(tar_entries(str(tmp_path / "good.tar")))
    border = entries[2].offset - 512
    damaged = bytearray(good)
    damaged[border + 3] ^= 1
    huge = bytearray(good)
    huge[border + 124 : border + 136] = b"77777777777\0"
    huge[border + 148 : border + 156] = b" " * 8
    huge[border + 148 : border + 156] = b"%06o\0 " % sum(huge[border : border + 512])
    cases = {
        "cut.tar": (good[: entries[3].offset + 100], "cut short within member 0003.jpg"),
        "border.tar": (good[:border], "cut short, its end mark is missing"),
        "header.tar": (good[: border + 100], f"damaged at byte {border} "),
        "flip.tar": (bytes(damaged), f"damaged at byte {border} "),
        "huge.tar": (bytes(huge), "cut short within member 0002.jpg"),
        "two.tar": (good + good, "goes on after its end mark"),
        "empty.tar": (b"", "empty file"),
        "text.tar": (b"no tar at all" * 100, "damaged (no tar header)"),
        "gz.tar": (gzip.compress(good), "compressed (gzip)"),
        "bz2.tar": (bz2.compress(good), "compressed (bzip2)"),
        "xz.tar": (lzma.compress(good), "compressed (xz)"),
    }
    for name, (content, part) in cases.items():
        path = tmp_path / name
        path.write_bytes(content)
        said = refusal(lambda path=path: scan(path))  # type: ignore[misc]
        assert said.startswith(f"{path}: {part}"), said
    assert [entry.name for entry in entries] == [name for name, _ in members]


def test_hostile_extension_headers_end(tmp_path: Path) -> None:
    """Lengths below zero, chains and endless names: `tarfile` of old recurses or never ends."""
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("0001.jpg")
        info.pax_headers = {"size": "-512", "comment": "c"}
        tar.addfile(info)
    assert "damaged at byte 0 (pax records)" in refusal(lambda: scan(tmp_path / "x.tar"))
    chain = tarfile.TarInfo("x")
    chain.type, chain.size = tarfile.XHDTYPE, 0
    (tmp_path / "y.tar").write_bytes(chain.tobuf() * 5000 + bytes(1024))
    assert list(tar_entries(str(tmp_path / "y.tar"))) == []
    chain.size = 1 << 30
    (tmp_path / "z.tar").write_bytes(chain.tobuf() + bytes(1024))
    assert "an endless name" in refusal(lambda: scan(tmp_path / "z.tar"))


def test_member_whose_change_could_not_be_noticed_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        info = tarfile.TarInfo("0001.jpg")
        info.pax_headers = {"path": "0002.jpg"}
        tar.addfile(info)
    assert "member 0002.jpg has an odd header" in refusal(lambda: scan(tmp_path / "x.tar"))


def test_member_that_moved_is_not_read(tmp_path: Path) -> None:
    """A shard written anew must not give another picture under an old place."""
    path = write_tar(tmp_path / "x.tar", [("1.jpg", jpeg(1)), ("2.jpg", jpeg(2))])
    first, second = _members(path)
    assert first.read_bytes() and second.read_bytes()
    with path.open("r+b") as file:
        file.truncate(second.offset + 10)
    with pytest.raises(OSError, match="ends within this member"):
        second.read_bytes()
    write_tar(path, [("1.jpg", jpeg(1)), ("new.jpg", jpeg(2))])
    assert first.read_bytes() == jpeg(1)
    for look in (second.read_bytes, second.verify, second.open):
        with pytest.raises(OSError, match="changed since it was listed"):
            look()
    status = "unreadable: the shard has changed since it was listed"
    assert check_file(second).status == read_header(second).status == status
    with pytest.raises(UserError, match=f"^{path} member 2.jpg: {status}"):
        read_rgb(second)
    path.unlink()
    assert check_file(first).status == "unreadable: No such file or directory"


def test_patterns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(8, 12):
        write_tar(tmp_path / f"heap-{i:04}.tar", [])
    (tmp_path / "photos").mkdir()
    (tmp_path / "odd{1,2}").mkdir()

    def names(pattern: str) -> list[str]:
        return [os.path.relpath(path, tmp_path) for path in expand(tmp_path / pattern)]

    assert names("heap-{0008..0010}.tar") == [f"heap-{i:04}.tar" for i in (8, 9, 10)]
    assert names("heap-00{08,11}.tar") == ["heap-0008.tar", "heap-0011.tar"]
    assert names("heap-*.tar") == [f"heap-{i:04}.tar" for i in range(8, 12)]
    assert names("heap-00{10..11,08}.tar") == ["heap-0010..11.tar", "heap-0008.tar"]
    assert names("odd{1,2}") == ["odd{1,2}"], "what exists is meant"
    assert "nothing matches" in refusal(lambda: expand(tmp_path / "heap-*.tat"))
    assert "is empty" in refusal(lambda: expand(tmp_path / "heap-{5..2}.tar"))
    (tmp_path / "x.zip").touch()
    assert "neither a folder nor a .tar file" in refusal(lambda: expand(tmp_path / "x.zip"))
    (tmp_path / "x.tgz").touch()
    assert "needs a plain .tar: decompress it" in refusal(lambda: expand(tmp_path / "x.tgz"))
    for url in ("https://host/x.tar", "s3://bucket/{0..9}.tar", "gs://b/x", "pipe:cat x.tar"):
        assert "copy them beside the machine or mount" in refusal(lambda url=url: expand(Path(url)))  # type: ignore[misc]


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
    """Case 1, for shards: what lies where it does not belong is counted, not used."""
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
    assert ignored.counts == {SHARD_OUTSIDE: 2, COMPRESSED: 1}
    assert sum(bool(row.member) for row in manifest.rows) == 8
    assert len(manifest.rows) == 12 + 24 + 8
    manifest, ignored = scan_folders(tmp_path / "shards", [root / "unlabeled", tmp_path / "shards"])
    assert ignored.counts == {TAKEN: 2, COMPRESSED: 1}
    assert [row.label for row in manifest.rows if row.split == "labeled"].count("cats") == 5
    (tmp_path / "only").mkdir()
    (tmp_path / "only/x.tar.gz").touch()
    said = refusal(lambda: scan_folders(root / "labeled", [tmp_path / "only"]))
    assert "no unlabeled image found (ignored: " in said and "1 compressed tar" in said


def test_numbers_as_classes_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    members = [(f"{i}.{e}", b"%d" % i) for i in (10, 9, 100) for e in ("jpg", "cls")]
    write_tar(tmp_path / "l.tar", members)
    write_tar(tmp_path / "u.tar", [("1.jpg", b"x")])
    manifest, _ = scan_folders(tmp_path / "l.tar", [tmp_path / "u.tar"])
    assert manifest.class_names == ("9", "10", "100")


@pytest.mark.skipif(os.getuid() != 0, reason="another user is needed to be refused")
def test_shard_without_permission_is_named(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("1.jpg", b"x")])
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith("/tmp/"):
            folder.chmod(0o755)
    path.chmod(0o600)
    code = (
        "import os, sys\n"
        "from simpro_fast.data.tar_members import tar_entries\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try: list(tar_entries(sys.argv[1]))\n"
        "except ValueError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"{path}: cannot be read (Permission denied)")
