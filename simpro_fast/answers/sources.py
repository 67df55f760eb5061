"""The images that a command line names, one after another: files, folders, shards, lists.

Nothing is collected: in memory is one folder's listing, one shard's headers, or one line of a list
at a time, and 8 bytes of every image, by which repeats are counted.
"""

from __future__ import annotations

import glob
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np

from simpro_fast.data.files.decode import OK, UNREADABLE, ImageSource
from simpro_fast.data.files.manifest import Row, relative, stream_rows
from simpro_fast.data.files.scan_folders import image_files
from simpro_fast.data.files.scan_shards import (
    braces,
    is_shard_name,
    refuse_address,
    scan_shard,
)
from simpro_fast.data.files.skipped import Ignored
from simpro_fast.data.files.tar_index import Member
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.local_files import remote
from simpro_fast.utils.regular_file import no_file

STANDARD_INPUT = "-"
_LISTS = (".csv", ".parquet")
_OTHER_LISTS = (".txt", ".lst", ".list", ".json", ".jsonl", ".tsv")
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True)
class Item:
    """One image, or one file that should have held some."""

    path: str
    """Path as it is shown."""
    member: str
    """Name in the tar shard `path`; else empty."""
    place: str | Member | None
    """The file, or what reads it; None: nothing does, for the reason in `status`."""
    status: str = OK
    listed: tuple[int, int] | None = None
    """Width and height that a list gives it."""

    @property
    def image(self) -> ImageSource | None:
        """Return what reads it."""
        return Path(self.place) if isinstance(self.place, str) else self.place


class Sources:
    """All images of the arguments, in their order; a folder's by name, a list's as listed.

    Paths are shown as they are reached from the working folder, or relative to `base`. An image
    that is named twice comes twice. A shard that is damaged is one item with its status.

    Args:
        arguments: files, folders, patterns, tar shards, manifests, `-` for a list of paths on
            `standard_input`, separated by newlines or NUL.
        base: what paths are shown relative to.

    Raises:
        ConfigError: `-` twice, or a list in a form that is not read.
        UserError: something that is not there, or that no images can be read from.
    """

    def __init__(
        self, arguments: Sequence[str], base: Path | None, standard_input: BinaryIO
    ) -> None:
        if arguments.count(STANDARD_INPUT) > 1:
            raise ConfigError("- stands for standard input, which can be read once")
        for argument in arguments:
            if why := remote(argument):
                raise ConfigError(why)
        self._base = None if base is None else Path(os.path.abspath(base))
        self._input = standard_input
        self._places = [place for argument in arguments for place in _expanded(argument)]
        for place in self._places:
            _check(place)
        self._seen = array("q")
        self.ignored = Ignored()
        """Files of folders and shards besides images; grows as they are read."""

    @property
    def names(self) -> list[str]:
        """Return what the arguments stand for, independent of the working folder."""
        return [p if p == STANDARD_INPUT else os.path.abspath(p) for p in self._places]

    @property
    def repeats(self) -> int:
        """How many of the items so far had come before."""
        return len(self._seen) - len(np.unique(np.array(self._seen)))

    def __iter__(self) -> Iterator[Item]:
        for place in self._places:
            for item in self._below(place):
                offset = item.place.offset if isinstance(item.place, Member) else 0
                self._seen.append(hash((os.path.abspath(item.path), item.member, offset)))
                yield self._shown(item)

    def _below(self, place: str) -> Iterator[Item]:
        if place == STANDARD_INPUT:
            for path in split_names(self._input):
                yield from self._file(path)
        elif os.path.isdir(place):
            root = os.path.abspath(place)
            for path in image_files(Path(place), self.ignored):
                yield from self._file(os.path.join(place, path[len(root) :].lstrip(os.sep)))
        elif place.lower().endswith(_LISTS):
            for row in stream_rows(Path(place)):
                listed = (row.width, row.height) if row.width else None
                yield Item(row.path, row.member, _place(row), listed=listed)
        else:
            yield from self._file(place)

    def _file(self, path: str) -> Iterator[Item]:
        if "\0" in path:
            yield Item(path, "", None, f"{UNREADABLE}: a NUL character in its name")
        elif not is_shard_name(path):
            yield Item(path, "", path)
        else:
            try:
                rows = scan_shard(path, "unlabeled", self.ignored)
            except UserError as error:
                said = str(error).removeprefix(f"{path}: ")
                yield Item(path, "", None, f"damaged: {said}")
                return
            for row in rows:
                yield Item(path, row.member, _place(row))

    def _shown(self, item: Item) -> Item:
        if self._base is None:
            return item
        path = relative(os.path.abspath(item.path), self._base)
        return replace(item, path=path)


def _place(row: Row) -> str | Member:
    # The table of names that pathlib keeps would see every path.
    image = row.image if row.member else row.path
    assert isinstance(image, str | Member)
    return image


def _expanded(argument: str) -> list[str]:
    """The paths that an argument stands for: itself, or what its braces and wildcards match."""
    if argument == STANDARD_INPUT or os.path.lexists(argument):
        return [argument]
    refuse_address(argument)
    found = []
    for path in braces(argument):
        if glob.has_magic(path) and not os.path.lexists(path):
            matches = sorted(glob.glob(path, recursive=True))
            if not matches:
                raise UserError(f"{path}: nothing matches this pattern; check the path")
            found += matches
        else:
            found.append(path)
    return found


def _check(place: str) -> None:
    if place == STANDARD_INPUT or os.path.isdir(place):
        return
    if said := no_file(place):
        raise UserError(f"{place}: {said}; give image files, folders, tar shards or a manifest")
    if place.lower().endswith(_OTHER_LISTS):
        raise ConfigError(
            f"{place}: a list of paths is read from standard input (`- < {place}`), or as a "
            "manifest (.csv or .parquet with a column `path`)"
        )


def split_names(stream: BinaryIO) -> Iterator[str]:
    """Names separated by NUL where the first block holds one, else by newlines.

    `find -print0` writes the one, which every name survives, editors write the other; there the
    carriage returns of Windows and empty lines are left out.
    """
    rest, separator = b"", b""
    while True:
        chunk = _read_some(stream)
        rest += chunk
        if not separator:
            separator = b"\0" if b"\0" in rest else b"\n" if b"\n" in rest or not chunk else b""
            rest = rest.removeprefix(b"\xef\xbb\xbf")
            if not separator:
                continue
        *whole, rest = rest.split(separator)
        for name in [*whole, *([] if chunk else [rest])]:
            if separator == b"\n":
                name = name.removesuffix(b"\r")
            if name:
                yield os.fsdecode(name)
        if not chunk:
            return


def _read_some(stream: BinaryIO) -> bytes:
    """Read what there is, without waiting for a whole block; empty at the end."""
    read1 = getattr(stream, "read1", stream.read)
    return bytes(read1(_CHUNK))
