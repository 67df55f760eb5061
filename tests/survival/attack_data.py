"""Attacks by a user's data: pictures, manifests, archives, names."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

from simpro_fast.cli import prepare
from simpro_fast.data.files.manifest import read_manifest
from simpro_fast.errors import UserError
from tests.data.file_loaders import loader
from tests.data.image_folders import picture, save, tidy
from tests.data.tar_shards import as_shards
from tests.survival.attack import Attempt, in_own_process, refused, trial, wrong_line


@trial("manifests")
def numbers_of_a_manifest(folder: Path) -> Iterator[Attempt]:
    path = folder / "manifest.csv"
    for column in ("width", "height", "bytes", "offset"):
        for value in ("-1", "1" + "0" * 21, "1e3", "nan", "9" * 5000, "2.5", "\u0661", " "):
            path.write_text(f"path,{column}\na.jpg,{value}\n", encoding="utf-8")
            complaint = refused(lambda: read_manifest(path), "line 2", f"{column}=")
            yield Attempt(f"{column} {value[:30]}", complaint)
    path.write_text("path,width\na.jpg,24\n")
    yield Attempt("width alone", refused(lambda: read_manifest(path), "line 2", "go together"))
    path.write_text("path,label\na\0.jpg,cats\n")
    yield Attempt("NUL in a path", refused(lambda: read_manifest(path), "line 2", "NUL"))
    path.write_text("path,label\na.jpg,ca\0ts\n")
    yield Attempt("NUL in a label", refused(lambda: read_manifest(path), "line 2", "NUL"))


def _edit(manifest: Path, name: str, **columns: object) -> None:
    """Change the row of a file in a manifest, as an editor would."""
    with manifest.open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        if row["path"].endswith(name):
            row.update({key: str(value) for key, value in columns.items()})
    with manifest.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def _manifest(root: Path) -> Path:
    folders = [f"--labeled={root}/labeled", f"--unlabeled={root}/unlabeled"]
    assert prepare.main([*folders, f"--output={root}/out"]) == 0
    return root / "out/manifest.csv"


def _error(root: Path, victim: Path | None = None, content: bytes = b"", **changes: object) -> str:
    """The error with which training ends.

    Args:
        victim, content: a file that is overwritten once training has begun.
    """
    if "manifest" in changes:
        changes = {"labeled": None, "unlabeled": (), **changes}
    try:
        with loader(root, prefetch=1, **changes) as made:
            for step in range(12):
                if step == 1 and victim is not None:
                    victim.write_bytes(content)
                made.next(step)
    except UserError as error:
        return str(error)
    return "no error"


def _train_on_other_sizes(place: str) -> list[tuple[str, str, list[str]]]:
    """(what, the error, what it must name) of each attempt."""
    root = tidy(Path(place), unlabeled=24)
    manifest = _manifest(root)
    whole = manifest.read_bytes()
    victim = root / "unlabeled/007.jpg"
    found = []
    for width, height in ((200, 40), (24, 24), (10**6, 10**6), (40, 38)):
        _edit(manifest, victim.name, width=width, height=height)
        error = _error(root, manifest=manifest)
        found.append((f"{width} x {height} listed", error, [f"{width} x {height} listed"]))
        _edit(manifest, victim.name, sha256="")
        error = _error(root, manifest=manifest)
        found.append(("the same, without a hash", error, [f"{width} x {height} listed"]))
        manifest.write_bytes(whole)
    good = victim.read_bytes()
    others = {
        "16 pixels": save(root / "small.jpg", picture(1, 16, 16)).read_bytes(),
        "400 pixels": save(root / "large.png", picture(1, 400, 300)).read_bytes(),
        "a text": b"this is no picture",
        "nothing": b"",
    }
    for what, content in others.items():
        for mode in ("error", "skip"):
            if what not in ("a text", "nothing") or mode == "error":
                error = _error(root, victim, content, on_bad_image=mode)
                found.append((f"{what} in place of a file, {mode}", error, [victim.name]))
                victim.write_bytes(good)
    tars = as_shards(root, root / "tars")
    shard = tars / "unlabeled-000.tar"
    whole = shard.read_bytes()
    place = whole.index(good)
    small = others["16 pixels"]
    other = whole[:place] + small + b"\0" * (len(good) - len(small)) + whole[place + len(good) :]
    error = _error(tars, shard, other)
    found.append(("16 pixels in place of a member", error, [str(shard), victim.name]))
    return found


@trial("wrong sizes")
def sizes_that_are_not_the_listed_ones(folder: Path) -> Iterator[Attempt]:
    """A crop that begins outside the picture crashes the process unless it is noticed before."""
    for what, error, words in in_own_process(_train_on_other_sizes, folder):
        yield Attempt(what, wrong_line(error, *words))
