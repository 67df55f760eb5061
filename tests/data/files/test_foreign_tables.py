"""Lists as spreadsheets and other programs write them, and lists that are cut off."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from simpro_fast.data.files.manifest import make_manifest, read_manifest, write_manifest
from simpro_fast.data.files.scan_folders import scan_folders
from simpro_fast.utils.errors import UserError
from tests.data.image_folders import tidy

PLAIN = "path,label\na.jpg,cats\nb.jpg,\nsub/c.jpg,dögs\n"


@pytest.mark.parametrize(
    ("text", "encoding", "told"),
    [
        (PLAIN, "utf-8-sig", None),
        (PLAIN.replace("\n", "\r\n"), "utf-8", None),
        (PLAIN.replace("\n", "\r"), "utf-8", None),
        (PLAIN.replace(",", ";"), "utf-8", "separated by a semicolon"),
        ("sep=;\r\n" + PLAIN.replace(",", ";"), "utf-8", "separated by a semicolon"),
        ("sep=\t\n" + PLAIN.replace(",", "\t"), "utf-16", "UTF-16, separated by a tab"),
        (PLAIN.replace(",", "\t"), "utf-16", "UTF-16, separated by a tab"),
        (PLAIN.replace(",", "\t"), "utf-16-be-bom", "UTF-16, separated by a tab"),
        (PLAIN.replace("path,label", "filename,class"), "utf-8", "'filename' is taken as path"),
        (PLAIN.replace("path,label", "file_name,category"), "utf-8", "'category' is taken as lab"),
        (PLAIN.replace("path,label", "Path, Label"), "utf-8", "'Path' is taken as path"),
        (PLAIN.replace("path,label", '"path","label"'), "utf-8", None),
    ],
)
def test_unambiguous_tables_are_read_and_told(
    tmp_path: Path, text: str, encoding: str, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    expected, path = tmp_path / "plain.csv", tmp_path / "m.csv"
    expected.write_text(PLAIN)
    bom = encoding == "utf-16-be-bom"
    path.write_bytes(b"\xfe\xff" + text.encode("utf-16-be") if bom else text.encode(encoding))
    with caplog.at_level(logging.INFO, "simpro_fast"):
        assert read_manifest(path) == read_manifest(expected)
    assert [told] == [told for m in caplog.messages if told and told in m and str(path) in m] or (
        told is None and not caplog.messages
    )


def test_separator_in_names_needs_quotes(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    path.write_text('path;label\n"a;b.jpg";cats\nc,d.jpg;dogs\n')
    assert [Path(row.path).name for row in read_manifest(path).rows] == ["a;b.jpg", "c,d.jpg"]
    path.write_text("path,label\na,b.jpg,cats\n")
    with pytest.raises(UserError, match=r"line 2: 3 values under 2 column.*in quotes"):
        read_manifest(path)


@pytest.mark.parametrize(
    ("data", "part"),
    [
        (b"image_id,label\n1,cats\n", "first line is 'image_id,label'"),
        (b"", "first line is empty"),
        (b"image,filename\na.jpg,b.jpg\n", "'image' and 'filename' could each be the path"),
        (b"path,label,label\na.jpg,x,y\n", "'label' (twice|and 'label')"),
        (b"path,label,class\na.jpg,x,y\n", "unknown column 'class'"),
        (
            "path,label\na.jpg,x\n".encode("utf-16-le"),
            "NUL characters, as UTF-16 .*save it as CSV in U",
        ),
        ("path\na.jpg\n".encode("utf-16")[:-1], "not whole in UTF-16"),
        (b"path\na\0.jpg\n", "line 2: a NUL character"),
        (b"sep=;\npath;label\na.jpg\n\nb.jpg;x;y\n", "line 5: 3 values under 2"),
        (b"sep=;\npath,label\na.jpg,x\n", "first line is 'path,label'"),
        (
            "path,label\na.jpg,x\nb.jpg,zéro\n".encode("latin-1"),
            "line 3: .*'zéro'.*save.* as UTF-8",
        ),
        (b"PAR1\x15\0\x15", "is Parquet, no CSV; save it as CSV"),
        (b"PK\3\4\x14\0\6\0", "is a workbook .*; save it as CSV"),
        (b"\x89PNG\r\n\x1a\n\0\0", "first line"),
    ],
)
def test_anything_else_is_one_line_with_what_was_found(
    tmp_path: Path, data: bytes, part: str
) -> None:
    path = tmp_path / "m.csv"
    path.write_bytes(data)
    with pytest.raises(UserError, match=part) as caught:
        read_manifest(path)
    assert str(path) in str(caught.value) and str(caught.value).isprintable()


def test_list_that_was_cut_off_is_told_as_such(tmp_path: Path) -> None:
    """At every byte of its last line: never a missing file, and never a silently dropped image."""
    root = tidy(tmp_path, unlabeled=3)
    manifest, _ = scan_folders(root / "labeled", [root / "unlabeled"])
    path = tmp_path / "whole.csv"
    write_manifest(make_manifest(tmp_path, manifest.rows), path)
    whole = path.read_bytes()
    last = whole.rstrip(b"\n").rindex(b"\n") + 1
    cut = tmp_path / "cut.csv"
    for length in range(last + 1, len(whole) - 1):
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match="the file was cut off; copy it again"):
            read_manifest(cut)
    cut.write_bytes(whole[:-1])  # as some editors leave it
    assert read_manifest(cut) == read_manifest(path)


def test_list_by_hand_that_was_cut_off(tmp_path: Path) -> None:
    root, path = tidy(tmp_path, unlabeled=3), tmp_path / "m.csv"
    whole = "path,label\nlabeled/cats/0.jpg,cats\nlabeled/dogs/0.jpg,dogs\nunlabeled/000.jpg,"
    path.write_text(whole)
    assert len(read_manifest(path).rows) == 3
    for text in (whole[:-1], whole[:-6]):
        path.write_text(text)
        with pytest.raises(UserError, match="line 4: 1 of 2 values, and the line has no end"):
            read_manifest(path)
    path.write_text("path\nunlabeled/000.jpg\nunlabeled/00")
    with pytest.raises(UserError, match=f"line 3: {root}/unlabeled/00 does not exist, and the l"):
        read_manifest(path)
    path.write_text('path,label\nlabeled/cats/0.jpg,"cat')
    with pytest.raises(UserError, match=r"line 2: not CSV .*ends within quotes: cut off"):
        read_manifest(path)
