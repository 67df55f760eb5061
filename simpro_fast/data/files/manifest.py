"""The list of images of a data set, as a file: UTF-8 CSV or Parquet.

Columns: `path` (relative to the manifest's folder), `label` (class name or empty), `split`
(labeled, unlabeled, val or test), `width`, `height` (pixels, upright), `bytes`, `sha256` (of the
file), `status` (`ok`, or why the file is not used). Only `path` is required in a list written by
hand: an image with a label is then labeled, one without is unlabeled, and sizes are read from the
files. Class names are held in NFC, files by the names that their folders have (utils/names.py).

Where images lie in tar shards, two columns are added: `path` is then the shard, `member` the name
in it, `offset` where its `bytes` bytes begin. Both are empty for a file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any

from simpro_fast.data.files.csv_table import stream_table
from simpro_fast.data.files.decode import OK, ImageSource
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import UserError, pip_line
from simpro_fast.utils.names import class_name, real_path
from simpro_fast.utils.regular_file import check_regular

SPLITS = ("labeled", "unlabeled", "val", "test")
EVALUATED = SPLITS[2:]
_LONGEST_SIDE, _LONGEST_FILE = 10**6, 2**60
_INTEGERS = {
    "width": _LONGEST_SIDE,
    "height": _LONGEST_SIDE,
    "bytes": _LONGEST_FILE,
    "offset": _LONGEST_FILE,
}
"""Columns of whole numbers and the largest of each."""
_WHOLE = re.compile(r"[0-9]{1,20}")


@dataclass(frozen=True, slots=True)
class Row:
    """One image; `path` is absolute in memory and relative to the manifest in its file.

    With `member`, the image is that member of the tar `path`, `bytes` long from `offset` on.
    """

    path: str
    label: str
    split: str
    width: int = 0
    height: int = 0
    bytes: int = 0
    sha256: str = ""
    status: str = OK
    member: str = ""
    offset: int = 0

    @property
    def image(self) -> ImageSource:
        """Return what reads it; as text, its name for messages."""
        if self.member:
            return Member(self.path, self.member, self.offset, self.bytes)
        return Path(self.path)


COLUMNS = tuple(field.name for field in fields(Row))
_OF_SHARDS = ("member", "offset")


@dataclass(frozen=True)
class Manifest:
    """Rows in order of split, then path, then place in the shard."""

    base: Path
    """Folder that paths are relative to, in the file and in the fingerprint."""
    rows: tuple[Row, ...]
    class_names: tuple[str, ...]
    """In `in_class_order`; of all rows with a label but unlabeled ones, damaged files included."""

    def usable(self) -> Manifest:
        """Without the rows whose status is not `ok`; the classes stay."""
        return replace(self, rows=tuple(row for row in self.rows if row.status == OK))

    def fingerprint(self) -> str:
        """sha256 over all rows; moving the folder as a whole does not change it.

        Lengths in bytes count only beside a hash of the content: where nothing was prepared, a
        file may be found damaged and repaired in the course of a run. Where in its shard an image
        lies never counts.
        """
        rows = tuple(
            replace(row, offset=0, bytes=row.bytes if row.sha256 else 0)
            if row.offset or not row.sha256
            else row
            for row in self.rows
        )
        return hashlib.sha256(_to_csv(replace(self, rows=rows))).hexdigest()


def make_manifest(base: Path, rows: Iterable[Row], class_names: Iterable[str] = ()) -> Manifest:
    """Sort the rows and collect the classes; `class_names` adds those without an image."""
    base = base.resolve()
    ordered = sorted(rows, key=lambda row: (SPLITS.index(row.split), row.path, row.offset))
    names = {row.label for row in ordered if row.label and row.split != "unlabeled"}
    return Manifest(base, tuple(ordered), in_class_order(names | set(class_names)))


def in_class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Sorted; numbers by their value where all classes are numbers, so that class 10 is not 2."""
    ordered = sorted(set(names))
    if all(name.isascii() and name.isdigit() for name in ordered):
        ordered.sort(key=int)
    return tuple(ordered)


def write_manifest(manifest: Manifest, path: Path) -> None:
    """Write CSV, or Parquet where the name ends in `.parquet`; whole or not at all."""
    if path.suffix == ".parquet":
        _write_parquet(manifest, path)
        return
    with replacing(path) as file:
        file.write(_to_csv(manifest))


def read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        UserError: missing, without a column `path`, a wrong value (names the line), or an
            image listed twice.
    """
    records = list(_records(path))
    base = path.parent.resolve()
    spelled: dict[str, dict[str, str]] = {}
    rows = [_row(record, base, f"{path} line {line}", spelled) for line, record in records]
    seen: set[tuple[str, str, bool]] = set()
    for (line, _), row in zip(records, rows, strict=True):
        # An image may serve as a labeled and as an unlabeled one, but not twice as either.
        key = (row.path, row.member, row.split == "unlabeled")
        if key in seen:
            raise UserError(f"{path} line {line}: {row.image} is listed twice; remove one")
        seen.add(key)
    return make_manifest(base, rows)


def stream_rows(path: Path) -> Iterator[Row]:
    """The rows of a manifest one at a time, in the order of the file, whether or not they are `ok`.

    Paths are not absolute but as they are reached through `path`, and an image may come twice.

    Raises:
        UserError: as `read_manifest`, when it comes to that.
    """
    spelled: dict[str, dict[str, str]] = {}
    for line, record in _records(path):
        yield _row(record, path.parent, f"{path} line {line}", spelled)


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number of the line, and values by column."""
    parquet = path.suffix == ".parquet"
    yield from _parquet_records(path) if parquet else stream_table(path, "run prepare first")


def csv_bytes(rows: Callable[[], Iterable[Sequence[object]]]) -> bytes:
    """Rows, iterated anew at each call, as CSV; names that are no UTF-8 keep their bytes."""
    text = ""
    for quoting in (csv.QUOTE_MINIMAL, csv.QUOTE_ALL):
        file = io.StringIO(newline="")
        csv.writer(file, lineterminator="\n", quoting=quoting).writerows(rows())
        text = file.getvalue()
        if "\r" not in text:  # which the first way leaves unquoted, and readers end a line at
            break
    return text.encode("utf-8", "surrogateescape")


def _to_csv(manifest: Manifest) -> bytes:
    columns = _columns(manifest)

    def rows() -> Iterator[Sequence[object]]:
        yield columns
        for row in manifest.rows:
            values = [getattr(row, name) for name in columns]
            yield [relative(row.path, manifest.base), *values[1:]]

    return csv_bytes(rows)


def _columns(manifest: Manifest) -> tuple[str, ...]:
    in_shards = any(row.member for row in manifest.rows)
    return COLUMNS if in_shards else tuple(name for name in COLUMNS if name not in _OF_SHARDS)


def relative(path: str, base: Path) -> str:
    """A path as it stands in a file in `base`."""
    inside = f"{base}{os.sep}"
    # The usual case by hand: relpath takes ten seconds for a million paths.
    short = path[len(inside) :] if path.startswith(inside) else os.path.relpath(path, base)
    return short.replace(os.sep, "/")


def _row(record: dict[str, Any], base: Path, where: str, spelled: dict[str, dict[str, str]]) -> Row:
    unknown = [str(name) for name in record if name not in COLUMNS]
    if unknown:
        raise UserError(f"{where}: unknown column {unknown[0]!r}; known: {', '.join(COLUMNS)}")
    values: dict[str, Any] = {
        name: _as_text(value) for name, value in record.items() if value not in (None, "")
    }
    if not values.get("path"):
        raise UserError(f"{where}: an empty path")
    if any("\0" in value for value in values.values()):
        raise UserError(f"{where}: a NUL character, which no name of a file has; write it anew")
    for name, most in _INTEGERS.items():
        text = values.get(name, "0")
        values[name] = int(text) if _WHOLE.fullmatch(text) else most + 1
        if values[name] > most:
            shown = text if len(text) < 30 else f"{text[:30]}..."
            raise UserError(f"{where}: {name}={shown!r} is not a whole number from 0 to {most}")
    if bool(values["width"]) != bool(values["height"]):
        raise UserError(f"{where}: width and height go together; give both or leave out both")
    label = class_name(values.get("label", ""), where)
    split = values.get("split", "labeled" if label else "unlabeled")
    if split not in SPLITS:
        raise UserError(f"{where}: split={split!r} is not one of {', '.join(SPLITS)}")
    if split != "unlabeled" and not label:
        raise UserError(f"{where}: an image of split {split} needs a label")
    if ("member" in values) != (values["offset"] > 0):
        raise UserError(f"{where}: an image in a shard needs both its member and its offset")
    # Lexically, so that a path written through a symbolic link is found again.
    values["path"] = real_path(os.path.normpath(base / values["path"]), spelled)
    return Row(**{**values, "label": label, "split": split})


def _as_text(value: object) -> str:
    """A value of a Parquet column as CSV has it: there a whole number may be a float."""
    return f"{value:.0f}" if isinstance(value, float) and value.is_integer() else str(value)


def pyarrow() -> Any:
    """The package.

    Raises:
        UserError: it is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise UserError(
            f"Parquet needs pyarrow: {pip_line('parquet')}; or use a .csv file"
        ) from None
    return pyarrow


def _write_parquet(manifest: Manifest, path: Path) -> None:
    arrow = pyarrow()
    columns = {name: [getattr(row, name) for row in manifest.rows] for name in _columns(manifest)}
    columns["path"] = [relative(row.path, manifest.base) for row in manifest.rows]
    try:
        table = arrow.table(columns)
    except UnicodeEncodeError:
        raise UserError(f"{path}: a file name is not UTF-8; rename it or use a .csv file") from None
    with replacing(path) as file:
        arrow.parquet.write_table(table, file)


def _parquet_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number of the row, from 1, and values by column."""
    arrow = pyarrow()
    try:
        length = check_regular(path).st_size
        with arrow.parquet.ParquetFile(path) as file:
            if file.metadata.num_rows > length:
                raise UserError(f"{path}: more rows than bytes, which no list of files has")
            if "path" not in file.schema_arrow.names:
                raise UserError(f"{path}: has no column `path`")
            batches = (batch.to_pylist() for batch in file.iter_batches())
            yield from enumerate(chain.from_iterable(batches), start=1)
    except (OSError, arrow.ArrowException) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path}: cannot be read as Parquet ({reason})") from None
