"""Tables that people make: CSV in UTF-8, separated by commas, semicolons or tabs."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpro_fast.utils.errors import UserError
from simpro_fast.utils.regular_file import check_regular

_SHOWN = 120

Record = tuple[int, dict[str, str]]
"""Number of the line, and its values by column."""


@dataclass(frozen=True)
class Table:
    """The lines of a table below its first, by column."""

    columns: tuple[str, ...]
    records: list[Record]


def read_table(path: Path, missing: str, key: str = "path") -> Table:
    """Read a CSV file with a column `key`.

    Args:
        missing: the cure when the file cannot be read.

    Raises:
        UserError: it cannot be read, lacks the column or is no CSV. Names the file, the line and
            what was found.
    """
    with _opened(path, missing, key) as (columns, records):
        return Table(columns, list(records))


def stream_table(path: Path, missing: str) -> Iterator[Record]:
    """The records of `read_table`, one at a time. Raises the same, when it comes to that."""
    with _opened(path, missing, "path") as (_, records):
        yield from records


@contextmanager
def _opened(
    path: Path, missing: str, key: str
) -> Iterator[tuple[tuple[str, ...], Iterator[Record]]]:
    """Columns and records."""
    try:
        check_regular(path)
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as text:
            first = text.readline(1 << 16)
            text.seek(0)
            separator = max(",;\t", key=first.count)
            reader = csv.reader(text, delimiter=separator, strict=True)
            columns = tuple(next(reader, ()))
            if key not in columns:
                raise UserError(
                    f"{path}: no column `{key}`; its first line is {first.rstrip()[:_SHOWN]!r}; "
                    f"expected are names of columns, such as {key},label, as CSV in UTF-8"
                )
            if len(set(columns)) < len(columns):
                raise UserError(f"{path}: has a column twice ({first.rstrip()[:_SHOWN]!r})")
            yield columns, _records(path, reader, columns, separator)
    except csv.Error as error:
        raise UserError(f"{path}: not CSV ({error})") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {missing}") from None


def _records(path: Path, reader: Any, columns: tuple[str, ...], separator: str) -> Iterator[Record]:
    width = len(columns)
    try:
        for values in reader:
            line = reader.line_num
            if len(values) > width:
                raise UserError(
                    f"{path} line {line}: {len(values)} values under {width} column(s); put a name "
                    f"that holds the separator {separator!r} in quotes"
                )
            if values:  # an empty line is none
                padded = [*values, *[""] * (width - len(values))]
                yield line, dict(zip(columns, padded, strict=True))
    except csv.Error as error:
        raise UserError(f"{path} line {reader.line_num}: not CSV ({error})") from None
