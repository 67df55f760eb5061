"""Labels from a table: what moves, what is refused by name, and what is remembered."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest

from simpro_fast.data.files.added_labels import FILE_NAME, with_labels
from simpro_fast.data.files.manifest import Manifest, Row, make_manifest
from simpro_fast.utils.errors import UserError


@pytest.fixture
def listed(tmp_path: Path) -> Manifest:
    rows = [
        Row(f"{tmp_path}/l/1.jpg", "cats", "labeled"),
        Row(f"{tmp_path}/l/2.jpg", "dogs", "labeled"),
        Row(f"{tmp_path}/v/1.jpg", "dogs", "val"),
        *(Row(f"{tmp_path}/u/{n}.jpg", "", "unlabeled") for n in range(6)),
        Row(f"{tmp_path}/u/known.jpg", "dogs", "unlabeled"),  # its label is for reports
        Row(f"{tmp_path}/u/kä.jpg", "", "unlabeled"),
        *(
            Row(f"{tmp_path}/u/x.tar", "", "unlabeled", bytes=9, member=f"{n}.jpg", offset=n * 1024)
            for n in (1, 2)
        ),
    ]
    (tmp_path / "out").mkdir()
    return make_manifest(tmp_path, rows)


def table(folder: Path, text: str, name: str = "queue.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def labels(manifest: Manifest) -> dict[str, str]:
    return {
        (row.member and f"x/{row.member}") or Path(row.path).name: row.label
        for row in manifest.rows
        if row.split == "labeled" and "/u/" in row.path
    }


def test_labeled_lines_move_and_nothing_else_changes(tmp_path: Path, listed: Manifest) -> None:
    decomposed = unicodedata.normalize("NFD", "../u/kä.jpg")
    queue = table(
        tmp_path,
        "path,member,label,pseudo_class,entropy\n"
        f"../u/0.jpg,,cats,dogs,0.7\n{tmp_path}/u/1.jpg,, dogs ,cats,0.6\nu/2.jpg,,,cats,0.5\n"
        f"../u/x.tar,1.jpg,cats,cats,0.4\n{decomposed},,dogs,,\n../u/known.jpg,,dogs,,\n"
        "../l/1.jpg,,cats,,\n",
    )
    done = with_labels(listed, tmp_path / "out", queue)
    assert labels(done.manifest) == {
        "0.jpg": "cats",
        "1.jpg": "dogs",
        "x/1.jpg": "cats",
        "kä.jpg": "dogs",
        "known.jpg": "dogs",
    }
    assert len(done.manifest.rows) == len(listed.rows)
    assert sum(row.split == "labeled" for row in done.manifest.rows) == 2 + 5
    assert done.lines == (
        f"labels of {queue}: 5 added (cats 2, dogs 3), 1 known before, 1 line(s) without a label",
    )
    assert not (tmp_path / "out" / FILE_NAME).exists(), "nothing is written before it is checked"


def test_given_twice_or_after_a_new_look_at_the_folders(tmp_path: Path, listed: Manifest) -> None:
    out, queue = tmp_path / "out", table(tmp_path, "path,label\nu/0.jpg,cats\nu/1.jpg,dogs\n")
    first = with_labels(listed, out, queue)
    first.keep(out)
    kept = (out / FILE_NAME).read_text()
    assert kept == "path,member,label\n../u/0.jpg,,cats\n../u/1.jpg,,dogs\n"
    for manifest in (first.manifest, listed):
        again = with_labels(manifest, out, queue)
        assert again.manifest == first.manifest and again.kept is None
        assert "0 added, 2 known before" in again.lines[0]
        assert with_labels(manifest, out, None).manifest == first.manifest
    more = with_labels(listed, out, table(tmp_path, "path,label\nu/2.jpg,cats\n"))
    more.keep(out)
    assert (out / FILE_NAME).read_text() == kept + "../u/2.jpg,,cats\n"
    gone = make_manifest(tmp_path, [row for row in listed.rows if not row.path.endswith("/0.jpg")])
    done = with_labels(gone, out, None)
    assert labels(done.manifest) == {"1.jpg": "dogs", "2.jpg": "cats"}
    assert "1 label(s)" in done.lines[0] and "are of images that are not listed" in done.lines[0]
    other = [Row(r.path, "dogs", "labeled") if "u/2" in r.path else r for r in listed.rows]
    with pytest.raises(UserError, match=r"added_labels\.csv: .*2\.jpg: has the label 'dogs' alre"):
        with_labels(make_manifest(tmp_path, other), out, None)


@pytest.mark.parametrize(
    ("lines", "part"),
    [
        ("u/nine.jpg,cats", r"line 2, u/nine\.jpg: is not in the list"),
        ("u/x.tar,cats", r"line 2, u/x\.tar: is not in the list"),
        (
            "u/0.jpg,catz",
            r"class .catz. is unknown \(a new one needs .*\); did you mean .cats.",
        ),
        ("u/0.jpg,owls", r"class 'owls' is unknown \(a new one needs --new-classes\); nothing"),
        ("l/1.jpg,dogs", "has the label 'cats' already, not 'dogs'"),
        ("u/known.jpg,cats", "has the label 'dogs' already, not 'cats'"),
        ("v/1.jpg,dogs", "is a val image"),
        ("u/0.jpg,cats\nu/0.jpg,dogs", "line 3, .*the label 'cats' in an earlier line and 'dogs'"),
        (
            "u/0.jpg,cats\nu/a.jpg,cats\nu/1.jpg,ows",
            "line 3, u/a.*; line 4, .*; nothing was",
        ),
        ("\n".join(f"u/a{n}.jpg,cats" for n in range(9)), "line 6.*; and 4 more; nothing"),
    ],
)
def test_wrong_lines_are_named_before_anything_is_written(
    tmp_path: Path, listed: Manifest, lines: str, part: str
) -> None:
    queue = table(tmp_path, f"path,label\n{lines}\n")
    with pytest.raises(UserError, match=part) as caught:
        with_labels(listed, tmp_path / "out", queue)
    assert str(queue) in str(caught.value)
    assert not list((tmp_path / "out").iterdir())


def test_new_classes_on_request(tmp_path: Path, listed: Manifest) -> None:
    queue = table(tmp_path, "path,label\nu/0.jpg,owls\nu/1.jpg,owls\n")
    done = with_labels(listed, tmp_path / "out", queue, new_classes=True)
    assert done.manifest.class_names == ("cats", "dogs", "owls")
    assert done.lines[1] == "new class(es): owls"
    done.keep(tmp_path / "out")
    assert with_labels(listed, tmp_path / "out", None).manifest == done.manifest


def test_spreadsheets_and_tables_without_labels(tmp_path: Path, listed: Manifest) -> None:
    queue = tmp_path / "queue.csv"
    queue.write_text("path;member;label\nu/0.jpg;;cats\n")
    assert labels(with_labels(listed, tmp_path / "out", queue).manifest) == {"0.jpg": "cats"}
    queue.write_bytes("path,label\nu/0.jpg,z\xe9ro\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"queue\.csv line 2: .* not UTF-8 .*'zéro'"):
        with_labels(listed, tmp_path / "out", queue, new_classes=True)
    with pytest.raises(UserError, match="has no column `label`, only path, entropy"):
        with_labels(listed, tmp_path / "out", table(tmp_path, "path,entropy\nu/0.jpg,1\n"))
    predicted = table(tmp_path, "path,class,class_id\nu/0.jpg,cats,0\n")
    with pytest.raises(UserError, match="has no column `label`"):
        with_labels(listed, tmp_path / "out", predicted)
    with pytest.raises(UserError, match=r"none\.csv: cannot be read"):
        with_labels(listed, tmp_path / "out", tmp_path / "none.csv")
