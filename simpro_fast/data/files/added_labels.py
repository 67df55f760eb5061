"""Labels that people gave to unlabeled images after the first training.

They come in a table `path,member,label` (what `pseudo --queue` writes, its column `label` filled
in) and join the labeled set of a list. Which they were is kept beside the manifest, in
`added_labels.csv`: a look at the folders, where those images still lie unlabeled, applies them
again.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from simpro_fast.data.files.csv_table import Table, read_table
from simpro_fast.data.files.manifest import (
    EVALUATED,
    Manifest,
    Row,
    csv_bytes,
    make_manifest,
    relative,
)
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.names import class_name, hint, nfc

FILE_NAME = "added_labels.csv"
_COLUMNS = ("path", "member", "label")
_SHOWN = 5
_Key = tuple[str, str]
"""Identity of an image: path in NFC, member."""


@dataclass(frozen=True)
class GivenLabel:
    """One line of a table of labels."""

    path: str
    """Path as written: absolute, or relative to the manifest, the table or the working folder."""
    member: str
    label: str
    """In NFC; empty where nobody has decided yet."""
    line: int


@dataclass(frozen=True)
class Labeled:
    """A list with given labels in it."""

    manifest: Manifest
    lines: tuple[str, ...]
    """Summary of what became of the labels, for people."""
    kept: bytes | None
    """The new content of `added_labels.csv`; None: it stays as it is."""

    def keep(self, folder: Path) -> None:
        """Write `added_labels.csv`, before the manifest: then no label can be lost."""
        if self.kept is not None:
            with replacing(folder / FILE_NAME) as file:
                file.write(self.kept)


def with_labels(
    manifest: Manifest, folder: Path, table: Path | None, *, new_classes: bool = False
) -> Labeled:
    """Put the labels of earlier tables and of `table` into a list; nothing is written.

    Args:
        folder: where the manifest lies, or will.
        table: new labels, if there are any.
        new_classes: a label may be a class that the list lacks.

    Raises:
        UserError: names every line that is wrong, up to a few: an image that is not listed or is
            tested on, an unknown class, a label that contradicts another one.
    """
    own, lines = folder / FILE_NAME, list[str]()
    earlier = read_labels(own) if os.path.lexists(own) else []
    classes = {*manifest.class_names, *(item.label for item in earlier if item.label)}
    known = _add(manifest, earlier, own, [folder.resolve()], classes, kept=True)
    if known.lost:
        lines.append(f"note: {known.lost} label(s) in {own} are of images that are not listed")
    if table is None:
        return Labeled(known.manifest, tuple(lines), None)
    given = read_labels(table)
    fresh = {item.label for item in given if item.label} - classes if new_classes else set()
    bases = [table.parent.resolve(), folder.resolve(), Path.cwd()]
    done = _add(known.manifest, given, table, bases, classes | fresh)
    each = ", ".join(f"{k} {n}" for k, n in sorted(Counter(r.label for r in done.added).items()))
    empty = sum(not item.label for item in given)
    lines.append(
        f"labels of {table}: {len(done.added)} added{f' ({each})' if each else ''}, "
        f"{done.known} known before, {empty} line(s) without a label"
    )
    if fresh:
        lines.append(f"new class(es): {', '.join(sorted(fresh))}")
    base = folder.resolve()
    labels = {(item.path, item.member): item.label for item in earlier}
    labels |= {(relative(row.path, base), row.member): row.label for row in done.added}
    kept = csv_bytes(lambda: [_COLUMNS, *((*key, label) for key, label in labels.items())])
    return Labeled(done.manifest, tuple(lines), kept if done.added else None)


def read_labels(path: Path) -> list[GivenLabel]:
    """The lines of a table of labels.

    Raises:
        UserError: it cannot be read, is no table, or has no column `path` or `label`.
    """
    return [
        GivenLabel(
            path=record["path"],
            member=record.get("member", ""),
            label=class_name(record["label"].strip(), f"{path} line {line}"),
            line=line,
        )
        for line, record in _label_table(path, "path").records
    ]


def check_no_labels(queue: Path, columns: tuple[str, ...], key: str) -> None:
    """Find out that a queue, written with these columns, holds nothing that a person has written.

    Args:
        key: the column that names the images.

    Raises:
        UserError: it does, or `read_labels` could not read it.
    """
    try:
        table = _label_table(queue, key)
    except UserError as error:
        raise UserError(f"{error}. What cannot be read is not replaced: move it away") from None
    if labels := sum(bool(record["label"].strip()) for _, record in table.records):
        raise UserError(
            f"{queue}: holds {labels} label(s); give them to prepare --add-labels, and move it away"
        )
    if table.columns != columns:
        raise UserError(
            f"{queue}: has the columns {', '.join(table.columns)}, which is no queue as it was "
            "written; move it away"
        )


def _label_table(path: Path, key: str) -> Table:
    table = read_table(path, "give the table that `pseudo --queue` wrote", key)
    if "label" not in table.columns:
        raise UserError(
            f"{path}: has no column `label`, only {', '.join(table.columns)}; fill in the class "
            "of each image that you know"
        )
    return table


@dataclass(frozen=True)
class _Added:
    manifest: Manifest
    added: list[Row]
    known: int
    lost: int


def _add(
    manifest: Manifest,
    given: Sequence[GivenLabel],
    source: Path,
    bases: Sequence[Path],
    classes: set[str],
    *,
    kept: bool = False,
) -> _Added:
    """Move images that were given a label from the unlabeled to the labeled set of a list.

    Args:
        bases: what relative paths may be relative to; the first with a listed image counts.
        classes: that labels may name.
        kept: they were accepted before, so images that are listed no more are only counted.
    """
    rows, places = list(manifest.rows), defaultdict[_Key, list[int]](list)
    for place, row in enumerate(rows):
        places[nfc(row.path), row.member].append(place)
    wrong, said, added = list[str](), dict[_Key, str](), list[Row]()
    known = lost = 0
    for item in given:
        if not item.label:
            continue
        keys = [(nfc(os.path.normpath(base / item.path)), item.member) for base in bases]
        key = next((key for key in keys if key in places), None)
        here = [rows[place] for place in places[key]] if key else []
        first = said.setdefault(key, item.label) if key else ""
        tested = next((row.split for row in here if row.split in EVALUATED), None)
        other = next((row.label for row in here if row.label not in ("", item.label)), None)
        if key is None:
            lost += 1
            if kept:
                continue
            reason = "is not in the list"
        elif item.label not in classes:
            near = hint(item.label, classes)
            reason = f"class {item.label!r} is unknown (a new one needs --new-classes){near}"
        elif first != item.label:
            reason = f"has the label {first!r} in an earlier line and {item.label!r} here"
        elif tested:
            reason = f"is a {tested} image, and what is tested on is not trained on"
        elif other:
            reason = f"has the label {other!r} already, not {item.label!r}"
        elif any(row.split == "labeled" for row in here):
            known += 1
            continue
        else:
            (place,) = places[key]  # a list names no unlabeled image twice
            rows[place] = replace(rows[place], label=item.label, split="labeled")
            added.append(rows[place])
            continue
        name = f"{item.path} member {item.member}" if item.member else item.path
        wrong.append(f"line {item.line}, {name}: {reason}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UserError(f"{source}: {'; '.join(wrong[:_SHOWN])}{more}; nothing was written")
    return _Added(make_manifest(manifest.base, rows, classes), added, known, lost)
