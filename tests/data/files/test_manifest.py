"""Finding images in folders, looking at files, and the manifest."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from simpro_fast.data.files.decode import check_file, read_header, read_rgb
from simpro_fast.data.files.manifest import (
    Manifest,
    Row,
    make_manifest,
    read_manifest,
    write_manifest,
)
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.data.files.skipped import HIDDEN, NO_IMAGE, OUTSIDE
from simpro_fast.utils.errors import UserError
from tests.data.image_folders import cut, picture, save, tidy


def names(manifest: Manifest, split: str) -> list[str]:
    rows = [row for row in manifest.rows if row.split == split]
    return [os.path.relpath(row.path, manifest.base) for row in rows]


def test_hidden_and_stray_files_are_no_classes_and_no_samples(tmp_path: Path) -> None:
    root = tidy(tmp_path)
    save(root / "labeled/.ipynb_checkpoints/x.jpg", picture(900))
    (root / "labeled/cats/._x.jpg").write_bytes(b"\0\5\26\7")
    (root / "labeled/cats/Thumbs.db").write_bytes(b"x")
    save(root / "labeled/loose.jpg", picture(901))
    manifest, ignored = scan_folders(root / "labeled", [root / "unlabeled"], root / "val")
    assert manifest.class_names == ("cats", "dogs", "owls")
    assert not any("._x" in row.path or "loose" in row.path for row in manifest.rows)
    assert ignored.counts == {HIDDEN: 2, NO_IMAGE: 1, OUTSIDE: 1}
    assert len(names(manifest, "labeled")) == 12


def test_flat_and_nested_folders(tmp_path: Path) -> None:
    """Nested, any case, spaces, unicode, links, several roots."""
    root = tidy(tmp_path, unlabeled=0)
    images = root / "images"
    for i, name in enumerate(("1.jpg", "a b.JPG", "sub/deep.jpeg", "ü.png")):
        save(images / name, picture(100 + i), format="png" if name == "ü.png" else "jpeg")
    (images / "readme.txt").write_text("hello")
    other = save(root / "elsewhere/linked/far.jpg", picture(110)).parent
    (images / "link").symlink_to(other)
    (images / "sub/circle").symlink_to(images)
    save(root / "second/2.jpg", picture(111))
    manifest, ignored = scan_folders(root / "labeled", [images, root / "second"])
    assert names(manifest, "unlabeled") == [
        "images/1.jpg",
        "images/a b.JPG",
        "images/link/far.jpg",
        "images/sub/deep.jpeg",
        "images/ü.png",
        "second/2.jpg",
    ]
    assert ignored.counts == {NO_IMAGE: 1}


@pytest.mark.parametrize(
    ("remove", "part"),
    [
        ("labeled/dogs labeled/owls", "only the class cats"),
        ("labeled", "labeled: cannot be read"),
        ("unlabeled/*", "no unlabeled image found"),
        ("val/*/*", "no image in class folders"),
    ],
)
def test_what_is_missing_is_said_in_one_line(tmp_path: Path, remove: str, part: str) -> None:
    root = tidy(tmp_path, unlabeled=2)
    subprocess.run(f"rm -r {remove}", shell=True, cwd=root, check=True)
    with pytest.raises(UserError, match=part) as caught:
        scan_folders(root / "labeled", [root / "unlabeled"], root / "val")
    assert len(str(caught.value).splitlines()) == 1


def test_formats(tmp_path: Path) -> None:
    """What is read is read as RGB; what is not is refused by name."""
    image = picture(1)
    exif = Image.Exif()
    exif[0x0112] = 6
    good = {
        "turned.jpg": save(tmp_path / "turned.jpg", image, exif=exif),
        "palette.png": save(tmp_path / "palette.png", image.quantize(32)),
        "png.jpg": save(tmp_path / "png.jpg", image, format="png"),
    }
    for name, path in good.items():
        facts = check_file(path)
        assert facts.status == "ok", name
        assert facts.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
        turned = name == "turned.jpg"
        assert (facts.width, facts.height) == ((36, 44) if turned else (44, 36)), name
        assert (facts.width, facts.height) == read_rgb(path).size
        assert read_rgb(path).mode == "RGB"
        header = read_header(path)
        assert header == replace(facts, sha256="")
    deep = Image.fromarray(np.arange(44 * 36, dtype=np.uint16).reshape(36, 44) * 40)
    refused = {
        "16-bit PNG": save(tmp_path / "deep.png", deep),
        "GIF": save(tmp_path / "g.gif", image),
        "TIFF": save(tmp_path / "t.tif", image),
        "GIF; ": save(tmp_path / "gif.jpg", image, format="gif"),
        "PNG with an orientation tag": save(tmp_path / "o.png", image, exif=exif),
        "WEBP with an orientation tag": save(tmp_path / "o.webp", image, exif=exif),
        "animated WEBP": save(
            tmp_path / "m.webp", image, save_all=True, append_images=[picture(2)]
        ),
    }
    for what, path in refused.items():
        status = check_file(path).status
        assert status.startswith("unsupported: ") and what in status, status
        assert read_header(path).status == status
        with pytest.raises(UserError, match=path.name):
            read_rgb(path)


def test_sixteen_bits_of_colour_are_noticed(tmp_path: Path) -> None:
    """Pillow shows such a file as 8-bit RGB; only its header tells."""
    import struct
    import zlib

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0)
    pixels = zlib.compress(b"\0" + bytes(12))
    path = tmp_path / "deep.png"
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )
    with Image.open(path) as image:
        assert image.mode == "RGB"
    assert check_file(path).status.startswith("unsupported: 16-bit PNG")


def test_damaged_files(tmp_path: Path) -> None:
    good = save(tmp_path / "good.jpg", picture(3, 200, 160))
    png = save(tmp_path / "good.png", picture(3, 200, 160))
    (tmp_path / "empty.jpg").touch()
    (tmp_path / "note.jpg").write_text("not a picture")
    reasons = {
        cut(tmp_path / "half.jpg", good): "truncated",
        cut(tmp_path / "tail.jpg", good, 0.97): "truncated",
        cut(tmp_path / "half.png", png): "",
        tmp_path / "empty.jpg": "empty",
        tmp_path / "note.jpg": "not an image",
        tmp_path / "gone.jpg": "No such file",
    }
    for path, reason in reasons.items():
        status = check_file(path).status
        kind = "unreadable: " if path.name == "gone.jpg" else "damaged: "
        assert status.startswith(kind) and reason in status, (path, status)
        with pytest.raises(UserError, match=path.name):
            read_rgb(path)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_written_manifest_is_read_back(tmp_path: Path, ending: str) -> None:
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    data, out = tmp_path / "data", tmp_path / "real/out"
    rows = [
        Row(str(data / 'a, "b"\n ü.jpg'), "cats", "labeled", 5, 6, 7, "ab", "ok"),
        Row(str(data / "cut.jpg"), "dogs", "labeled", 0, 0, 9, "cd", "damaged: truncated"),
        Row(str(out / "x.png"), "", "unlabeled", 8, 9, 10, "ef", "ok"),
    ]
    out.mkdir(parents=True)
    (tmp_path / "link").symlink_to(out)  # written through a link, read without it
    manifest = make_manifest(tmp_path / "link", reversed(rows))
    path = tmp_path / "link" / f"manifest.{ending}"
    write_manifest(manifest, path)
    back = read_manifest(out / path.name)
    assert back == manifest
    assert back.rows == tuple(rows)
    assert back.class_names == ("cats", "dogs")
    assert back.fingerprint() == manifest.fingerprint()
    assert [row.label for row in back.usable().rows] == ["cats", ""]
    assert back.usable().class_names == ("cats", "dogs")
    assert not list(out.glob(".*"))


@pytest.mark.parametrize("name", [b"\xff.jpg", b"a\r.jpg", b"a\n.jpg", b"a\", '\r\n.jpg", b" .jpg"])
def test_odd_names_come_back(tmp_path: Path, name: bytes) -> None:
    odd = os.fsdecode(name)
    in_shard = Row(str(tmp_path / "x.tar"), "", "unlabeled", bytes=1, member=odd, offset=512)
    manifest = make_manifest(tmp_path, [Row(str(tmp_path / odd), "", "unlabeled"), in_shard])
    write_manifest(manifest, tmp_path / "m.csv")
    assert read_manifest(tmp_path / "m.csv") == manifest


def test_fingerprint_follows_the_content_and_not_the_place(tmp_path: Path) -> None:
    def fingerprint(base: str, **changes: object) -> str:
        values: dict[str, object] = {"label": "a", "split": "labeled", "bytes": 3, "sha256": "x"}
        row = Row(path=str(tmp_path / base / "d/1.jpg"), **{**values, **changes})  # type: ignore[arg-type]
        return make_manifest(tmp_path / base, [row]).fingerprint()

    first = fingerprint("one")
    assert fingerprint("two") == first
    others = {
        fingerprint("one", **{k: v}) for k, v in (("label", "b"), ("bytes", 4), ("sha256", "y"))
    }
    assert len(others | {first}) == 4


def test_hand_written_list(tmp_path: Path) -> None:
    (tmp_path / "m.csv").write_text("path,label\na.jpg,cats\nb.jpg,\nsub/../c.jpg,dogs\n")
    manifest = read_manifest(tmp_path / "m.csv")
    assert [(Path(r.path).name, r.label, r.split) for r in manifest.rows] == [
        ("a.jpg", "cats", "labeled"),
        ("c.jpg", "dogs", "labeled"),
        ("b.jpg", "", "unlabeled"),
    ]
    assert all(Path(r.path).parent == tmp_path for r in manifest.rows)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("name\na.jpg\n", "no column `path`"),
        ("path,colour\na.jpg,red\n", "unknown column 'colour'"),
        ("path,split\na.jpg,train\n", "line 2: split='train'"),
        ("path,split\na.jpg,val\n", "line 2: an image of split val needs a label"),
        ("path,width\na.jpg,1.5\n", "line 2: width='1.5'"),
        ("path\na.jpg\nb.jpg\na.jpg\n", "line 4: .*listed twice"),
        ('path\n""\n', "empty path"),
        ('path\n"a\n', "not CSV"),
    ],
)
def test_faulty_list_is_named_by_line(tmp_path: Path, text: str, part: str) -> None:
    path = tmp_path / "m.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=part) as caught:
        read_manifest(path)
    assert str(path) in str(caught.value)


def test_missing_manifest_and_missing_pyarrow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="run prepare first"):
        read_manifest(tmp_path / "none.csv")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"`pip install 'pyarrow>=15'`"):
        read_manifest(tmp_path / "m.parquet")
