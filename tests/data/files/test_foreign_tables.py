"""Lists as spreadsheets write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from simpro_fast.data.files.manifest import read_manifest
from simpro_fast.utils.errors import UserError

PLAIN = "path,label\na.jpg,cats\nb.jpg,\nsub/c.jpg,dögs\n"


@pytest.mark.parametrize(
    ("text", "encoding"),
    [
        (PLAIN, "utf-8-sig"),
        (PLAIN.replace("\n", "\r\n"), "utf-8"),
        (PLAIN.replace(",", ";"), "utf-8"),
        (PLAIN.replace(",", "\t"), "utf-8-sig"),
        (PLAIN.replace("path,label", '"path","label"'), "utf-8"),
    ],
)
def test_separators_and_ends_of_lines(tmp_path: Path, text: str, encoding: str) -> None:
    expected, path = tmp_path / "plain.csv", tmp_path / "m.csv"
    expected.write_text(PLAIN)
    path.write_bytes(text.encode(encoding))
    assert read_manifest(path) == read_manifest(expected)


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
        (b"", "no column `path`"),
        (b"path,label,label\na.jpg,x,y\n", "has a column twice"),
        (b"path,label,class\na.jpg,x,y\n", "unknown column 'class'"),
        ("path,label\na.jpg,x\n".encode("utf-16"), "as CSV in UTF-8"),
        (b"path\na\0.jpg\n", "line 2: "),
        ("path,label\na.jpg,x\nb.jpg,zéro\n".encode("latin-1"), "line 3: .*'zéro'.*as UTF-8"),
        (b'path,label\na.jpg,"cat', "line 2: not CSV"),
        (b"PK\3\4\x14\0\6\0", "as CSV in UTF-8"),
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
