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
from simpro_fast.utils.names import class_name, difference, hint, nfc

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
        new_classes: a label may be a class that the list lacks, but not one that looks like one.

    Raises:
        UserError: names every line that is wrong, up to a few: an image that is not listed or is
            tested on, an unknown class, a label that contradicts another one.
    """
    own, lines = folder / FILE_NAME, list[str]()
    earlier = read_labels(own) if os.path.lexists(own) else []
    first = _Adding(manifest, folder, own)
    first.add(earlier, kept=True)
    if first.lost:
        lines.append(f"note: {first.lost} label(s) in {own} are of images that are not listed")
    if table is None:
        return Labeled(first.result(), tuple(lines), None)
    second = _Adding(first.result(), folder, table)
    second.add(read_labels(table), new_classes=new_classes)
    counts = Counter(row.label for row in second.added)
    each = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
    lines.append(
        f"labels of {table}: {len(second.added)} added{f' ({each})' if each else ''}, "
        f"{second.known} known before, {second.empty} line(s) without a label"
    )
    if second.new_classes:
        lines.append(f"new class(es): {', '.join(second.new_classes)}")
    base = folder.resolve()
    labels = {(item.path, item.member): item.label for item in earlier}
    labels |= {(relative(row.path, base), row.member): row.label for row in second.added}
    kept = csv_bytes(lambda: [_COLUMNS, *((*key, label) for key, label in labels.items())])
    return Labeled(second.result(), tuple(lines), kept if second.added else None)


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
    if "class_id" in table.columns:
        raise UserError(
            f"{path}: holds a network's predictions, no labels; write what you know into the "
            "column `label` of what `pseudo --queue` wrote"
        )
    return table


class _Adding:
    """Moves images that were given a label from the unlabeled to the labeled set of a list."""

    def __init__(self, manifest: Manifest, folder: Path, source: Path) -> None:
        self._manifest, self._rows, self._source = manifest, list(manifest.rows), source
        self._classes = set(manifest.class_names)
        self._bases = (source.parent.resolve(), folder.resolve(), Path.cwd())
        self._places: dict[_Key, list[int]] = defaultdict(list)
        for place, row in enumerate(manifest.rows):
            self._places[nfc(row.path), row.member].append(place)
        self.added: list[Row] = []
        self.new_classes: list[str] = []
        self.known = self.empty = self.lost = 0

    def result(self) -> Manifest:
        return make_manifest(self._manifest.base, self._rows, self._classes)

    def add(
        self, given: Sequence[GivenLabel], *, new_classes: bool = False, kept: bool = False
    ) -> None:
        """Add all of them, or raise and leave the list to be thrown away.

        Args:
            kept: they were accepted before, so their classes count as known, and images that are
                listed no more are counted instead of refused.
        """
        if kept:
            self._classes |= {item.label for item in given if item.label}
        wrong, said = list[str](), dict[_Key, str]()
        for item in given:
            if not item.label:
                self.empty += 1
                continue
            keys = self._keys(item, kept)
            if not keys:
                self.lost += 1
                reason = None if kept else "is not in the list"
            elif len(keys) > 1:
                reason = f"is {keys[0][0]} or {keys[1][0]}; write the whole path"
            else:
                reason = self._no_class(item.label, new_classes) or self._move(
                    keys[0], item.label, said.setdefault(keys[0], item.label)
                )
            if reason is not None:
                name = f"{item.path} member {item.member}" if item.member else item.path
                wrong.append(f"line {item.line}, {name}: {reason}")
        if wrong:
            more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
            raise UserError(
                f"{self._source}: {'; '.join(wrong[:_SHOWN])}{more}; nothing was written"
            )

    def _keys(self, item: GivenLabel, kept: bool) -> list[_Key]:
        """The listed images that a line may mean; the paths that we keep have one base."""
        bases = self._bases[:1] if kept else self._bases
        keys = ((nfc(os.path.normpath(base / item.path)), item.member) for base in bases)
        return list(dict.fromkeys(key for key in keys if key in self._places))

    def _no_class(self, label: str, new_classes: bool) -> str | None:
        """Why a label is no class, not even a new one."""
        if label in self._classes:
            return None
        twin = next((name for name in self._classes if difference(label, name)), None)
        if twin is not None:
            what = difference(label, twin)
            return f"class {label!r} differs from {twin!r} in {what} alone; write {twin!r}"
        near = hint(label, self._classes)
        unknown = f"class {label!r} is unknown (a new one needs --new-classes){near}"
        return None if new_classes else unknown

    def _move(self, key: _Key, label: str, first: str) -> str | None:
        """Label one image; why that cannot be, or None."""
        if label != first:
            return f"has the label {first!r} in an earlier line and {label!r} here"
        here = [self._rows[place] for place in self._places[key]]
        for row in here:
            if row.split in EVALUATED:
                return f"is a {row.split} image, and what is tested on is not trained on"
            if row.label not in ("", label):
                return f"has the label {row.label!r} already, not {label!r}"
        if label not in self._classes:
            self._classes.add(label)
            self.new_classes.append(label)
        if any(row.split == "labeled" for row in here):
            self.known += 1
        else:
            (place,) = self._places[key]  # a list names no unlabeled image twice
            self._rows[place] = replace(self._rows[place], label=label, split="labeled")
            self.added.append(self._rows[place])
        return None
