"""Tables that people make: CSV by the separator, the encoding and the column names they have.

Written by us, a table is UTF-8 with commas and our names. Spreadsheets write semicolons, tabs and
UTF-16, other programs `filename,class`. What the first line leaves no doubt about is taken and
logged; anything else is an error that says what was found.
"""

from __future__ import annotations

import codecs
import csv
import io
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from simpro_fast.utils.errors import UserError
from simpro_fast.utils.regular_file import open_regular

logger = logging.getLogger(__name__)

_SEPARATORS = {",": "comma", ";": "semicolon", "\t": "tab"}
OTHER_NAMES = {
    "path": (
        *("filename", "file_name", "file", "filepath", "file_path"),
        *("image", "image_path", "image_name", "img", "img_path"),
    ),
    "label": ("class", "class_name", "category", "target"),
}
"""Names of our columns in other programs; taken where ours is missing and no two could be meant."""
_SHOWN, _HEADER_LINES = 120, 20
_EXCEL = re.compile(r'"?sep=([,;\t])"?\s*')
"""A first line by which Excel is told the separator."""
_NO_TABLE = {
    b"PAR1": "Parquet",
    b"PK\3\4": "a workbook (or another zip)",
    b"\xd0\xcf\x11\xe0": "an old workbook",
}
"""Files that people take for a table, by their first bytes."""


Record = tuple[int, dict[str, str]]
"""Number of the line, and its values by column."""


@dataclass(frozen=True)
class Table:
    """The lines of a table below its first, by column."""

    columns: tuple[str, ...]
    """Our names where they are known, else as written."""
    records: list[Record]
    unfinished: bool
    """The last line has no end, as where a copy broke off, or as some editors leave it."""


def read_table(path: Path, missing: str, key: str = "path") -> Table:
    """Read a CSV file with a column `key`.

    Args:
        missing: the cure when the file cannot be read.

    Raises:
        UserError: it cannot be read, lacks the column, is cut off within a line or is no CSV. Names
            the file, the line and what was found.
    """
    with _opened(path, missing, key) as (columns, records, unfinished):
        return Table(columns, list(records), unfinished)


def stream_table(path: Path, missing: str) -> Iterator[Record]:
    """The records of `read_table`, one at a time. Raises the same, when it comes to that."""
    with _opened(path, missing, "path") as (_, records, _):
        yield from records


@contextmanager
def _opened(
    path: Path, missing: str, key: str
) -> Iterator[tuple[tuple[str, ...], Iterator[Record], bool]]:
    """Columns, records and whether the last line has no end."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - 2))
            # Either half of a character in UTF-16 may be the zero.
            unfinished = file.read().strip(b"\0")[-1:] not in (b"\n", b"\r")
            file.seek(0)
            start = file.peek(4)
            if kind := next((_NO_TABLE[b] for b in _NO_TABLE if start.startswith(b)), None):
                raise UserError(f"{path}: is {kind}, no CSV; save it as CSV in UTF-8")
            wide = start[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
            encoding, errors = ("utf-16", "strict") if wide else ("utf-8-sig", "surrogateescape")
            text = io.TextIOWrapper(file, encoding, errors, newline="")
            head = [text.readline()]
            told = _EXCEL.fullmatch(head[0])
            if told:
                head.append(text.readline())
            separator = told[1] if told else max(_SEPARATORS, key=head[0].count)
            for _ in range(_HEADER_LINES):
                if head[-1].count('"') % 2:  # a quoted name may hold the end of a line
                    head[-1] += text.readline()
            columns, renamed = _header(path, head[-1], separator, key)
            taken = [
                *(["UTF-16"] if wide else []),
                *([f"separated by a {_SEPARATORS[separator]}"] if separator != "," else []),
                *(f"column {name!r} is taken as {ours}" for name, ours in renamed.items()),
            ]
            if taken:
                logger.info("%s: %s", path, ", ".join(taken))
            yield columns, _records(path, head, text, separator, columns, unfinished), unfinished
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is not whole in UTF-16 ({error.reason}); save it as UTF-8"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); {missing}") from None


def cut_off(path: Path, line: int, found: str) -> UserError:
    """The refusal of a table whose end is missing."""
    return UserError(
        f"{path} line {line}: {found}, and the line has no end: the file was cut off; copy it again"
    )


def _header(
    path: Path, line: str, separator: str, key: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Our names of the columns, and those that were written otherwise."""
    if "\0" in line:
        raise UserError(
            f"{path}: its first line holds NUL characters, as UTF-16 without its mark has, "
            "and what is no text; save it as CSV in UTF-8"
        )
    try:
        written = next(csv.reader([line], delimiter=separator), [])
    except csv.Error:  # a line longer than any of names
        written = []
    names = [name.strip().casefold() for name in written]
    columns = list(written)
    for ours, others in OTHER_NAMES.items():
        meant = [i for i, name in enumerate(names) if name == ours]
        meant = meant or [i for i, name in enumerate(names) if name in others]
        if len(meant) > 1:
            both = " and ".join(repr(written[i]) for i in meant)
            raise UserError(f"{path}: {both} could each be the {ours}; call one of them `{ours}`")
        for i in meant:
            columns[i] = ours
    if key not in columns:
        found = f"is {line.rstrip()[:_SHOWN]!r}" if line.rstrip() else "is empty"
        raise UserError(
            f"{path}: has no column `{key}`; its first line {found}, expected are names of "
            f"columns, such as {key},label"
        )
    twice = next((name for name in columns if columns.count(name) > 1), None)
    if twice is not None:
        raise UserError(f"{path}: has the column {twice!r} twice; leave one out")
    renamed = {old: new for old, new in zip(written, columns, strict=True) if old != new}
    return tuple(columns), renamed


def _records(
    path: Path,
    head: Sequence[str],
    rest: Iterable[str],
    separator: str,
    columns: Sequence[str],
    unfinished: bool,
) -> Iterator[Record]:
    reader = csv.reader(chain(head, rest), delimiter=separator, strict=True)
    width, line = len(columns), 0
    short: tuple[int, int] | None = None
    try:
        for number, values in enumerate(reader):
            line = reader.line_num
            if number < len(head) or not values:  # an empty line is none
                continue
            if len(values) > width:
                raise UserError(
                    f"{path} line {line}: {len(values)} values under {width} column(s); put a name "
                    f"that holds the separator {separator!r} in quotes"
                )
            short = (line, len(values)) if len(values) < width else None
            yield line, dict(zip(columns, [*values, *[""] * (width - len(values))], strict=True))
    except csv.Error as error:
        reason = str(error)
        if "unexpected end" in reason:
            reason = "it ends within quotes: cut off, or a quote is missing"
        raise UserError(f"{path} line {reader.line_num}: not CSV ({reason})") from None
    if unfinished and short is not None:
        raise cut_off(path, short[0], f"{short[1]} of {width} values")
