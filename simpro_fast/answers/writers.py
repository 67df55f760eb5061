"""Tables and arrays that grow at their end, and become CSV, JSON lines, Parquet or .npy.

Each format turns rows into bytes that are appended to a partial file, which can be cut at any
border between appends and go on from there; `finish` makes the file of it.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from simpro_fast.data.files.manifest import csv_bytes, pyarrow
from simpro_fast.utils.atomic_write import replacing
from simpro_fast.utils.errors import ConfigError

Columns = Mapping[str, Sequence[Any] | np.ndarray]
"""Equally long columns by name; None is an empty value. Numbers are float32, of which the shortest
decimal that reads back as the same is written."""
Kinds = Mapping[str, str]
"""The kind of each column: `text`, `integer`, `number` or `flag`."""
ROW_GROUP = 1 << 16
"""Rows of a row group of Parquet."""


class Format:
    """How rows become bytes."""

    def head(self) -> bytes:
        """Return what the partial file begins with."""
        return b""

    def encode(self, columns: Columns) -> bytes:
        """Return what some rows append to it."""
        raise NotImplementedError

    def finish(self, partial: Path, final: Path, rows: int) -> None:
        """Turn a whole partial file into the final one; may be called again if it was killed."""
        move(partial, final)


class Csv(Format):
    """UTF-8, one line of names; names of files that are no UTF-8 keep their bytes."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds

    def head(self) -> bytes:
        return _csv([list(self._kinds)])

    def encode(self, columns: Columns) -> bytes:
        return _csv([[_plain(value) for value in row] for row in _rows(columns, self._kinds)])


class JsonLines(Format):
    """One JSON object a line; a name that is no UTF-8 has `\\udc80` to `\\udcff` for its bytes."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds

    def encode(self, columns: Columns) -> bytes:
        lines = []
        for row in _rows(columns, self._kinds):
            record = dict(zip(self._kinds, row, strict=True))
            try:
                line = json.dumps(record, ensure_ascii=False, default=_jsonable).encode()
            except UnicodeEncodeError:
                line = json.dumps(record, default=_jsonable).encode()
            lines.append(line + b"\n")
        return b"".join(lines)


class Parquet(Format):
    """Row groups of `ROW_GROUP` rows; the partial file is a row of Arrow's messages.

    Its text is UTF-8: bytes of a name that are not become `\\udc80` to `\\udcff`, spelled out.

    Raises:
        UserError: without pyarrow.
    """

    def __init__(self, kinds: Kinds) -> None:
        self._arrow = pyarrow()
        types = {
            "text": self._arrow.string(),
            "integer": self._arrow.int64(),
            "number": self._arrow.float32(),
            "flag": self._arrow.bool_(),
        }
        self._kinds = kinds
        self._schema = self._arrow.schema([(name, types[kind]) for name, kind in kinds.items()])

    def encode(self, columns: Columns) -> bytes:
        arrays = [
            self._arrow.array(
                [_utf8(value) for value in columns[name]] if kind == "text" else columns[name],
                type=self._schema.field(name).type,
            )
            for name, kind in self._kinds.items()
        ]
        batch = self._arrow.record_batch(arrays, schema=self._schema)
        return bytes(batch.serialize())

    def finish(self, partial: Path, final: Path, rows: int) -> None:
        if not partial.exists():  # killed after this was done
            return
        with replacing(final) as file, self._arrow.parquet.ParquetWriter(file, self._schema) as out:
            waiting, count = [], 0
            for batch in self._batches(partial):
                waiting.append(batch)
                count += batch.num_rows
                if count >= ROW_GROUP:
                    table = self._arrow.Table.from_batches(waiting)
                    out.write_table(table.slice(0, ROW_GROUP), ROW_GROUP)
                    waiting = table.slice(ROW_GROUP).to_batches()
                    count -= ROW_GROUP
            out.write_table(self._arrow.Table.from_batches(waiting, self._schema), ROW_GROUP)
        partial.unlink()

    def _batches(self, partial: Path) -> Iterator[Any]:
        with partial.open("rb") as file:
            while True:
                try:
                    message = self._arrow.ipc.read_message(file)
                except EOFError:
                    return
                yield self._arrow.ipc.read_record_batch(message, self._schema)


class Array(Format):
    """The column `logits` as an array .npy, float32 [rows, K]; its header is completed last."""

    def __init__(self, classes: int) -> None:
        self._classes = classes

    def head(self) -> bytes:
        return self._header(0)

    def encode(self, columns: Columns) -> bytes:
        return np.ascontiguousarray(columns["logits"], "<f4").tobytes()

    def finish(self, partial: Path, final: Path, rows: int) -> None:
        header = self._header(rows)
        assert len(header) == len(self.head())  # numpy leaves room for the first axis to grow
        if partial.exists():
            with partial.open("r+b") as file:
                file.write(header)
        move(partial, final)

    def _header(self, rows: int) -> bytes:
        file = io.BytesIO()
        description = {"descr": "<f4", "fortran_order": False, "shape": (rows, self._classes)}
        np.lib.format.write_array_header_1_0(file, description)
        return file.getvalue()


_TABLES: dict[str, type[Csv] | type[JsonLines] | type[Parquet]] = {
    ".csv": Csv,
    ".jsonl": JsonLines,
    ".parquet": Parquet,
}


def table_format(path: Path, kinds: Kinds) -> Format:
    """The format that a file's ending names.

    Raises:
        ConfigError: another ending.
        UserError: Parquet without pyarrow.
    """
    kind = _TABLES.get(path.suffix.lower())
    if kind is None:
        raise ConfigError(f"{path}: its ending must be one of {', '.join(_TABLES)}")
    return kind(kinds)


def move(partial: Path, final: Path) -> None:
    """Give a whole file its name, once it is on the disk; it may have it already."""
    if not partial.exists():
        return
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(partial, final)


def _csv(rows: Sequence[Sequence[object]]) -> bytes:
    return csv_bytes(lambda: rows)


def _rows(columns: Columns, kinds: Kinds) -> Iterator[tuple[Any, ...]]:
    return zip(*(columns[name] for name in kinds), strict=True)


def _plain(value: object) -> object:
    return str(value).lower() if isinstance(value, bool | np.bool_) else value


def _jsonable(value: Any) -> Any:
    """Convert numpy's types; a float32 by its own digits, not those of the float64 next to it."""
    return float(str(value)) if isinstance(value, np.floating) else value.item()


def _utf8(text: str | None) -> str | None:
    if text is None or text.isascii():
        return text
    return text.encode("utf-8", "backslashreplace").decode()
