"""Members of uncompressed tar files: found once by their headers, then read by offset.

`tarfile` reads the headers. Names are text to show and to compare: nothing is ever unpacked, so no
name becomes a path. A file that is damaged, cut short or goes on after its end is refused;
`tarfile` alone would take what lies before the break for the whole.
"""

from __future__ import annotations

import errno
import io
import os
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass

from simpro_fast.utils.errors import UserError
from simpro_fast.utils.printable import printable
from simpro_fast.utils.regular_file import open_regular

_BLOCK = 512
_REGULAR = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.CONTTYPE)
FILE, FOLDER, SPECIAL = "file", "folder", "link, device or sparse file"


@dataclass(frozen=True, slots=True)
class Entry:
    """One member as its header describes it."""

    name: str
    kind: str
    """`FILE`, `FOLDER` or `SPECIAL`."""
    offset: int
    """Offset of the content, in bytes from the start of the tar."""
    length: int


@dataclass(frozen=True, slots=True)
class Member:
    """A file inside a tar, where a `Path` would stand: read without unpacking.

    Raises (all methods):
        OSError: the tar is gone or is not the one that was listed: the header before the content
            must still be this member's.
    """

    shard: str
    name: str
    offset: int
    length: int

    def __str__(self) -> str:
        return f"{self.shard} member {printable(self.name)}"

    def read_bytes(self) -> bytes:
        return bytes(self.read_view())

    def read_view(self) -> memoryview:
        """The content, not copied once more."""
        data = self._read(_BLOCK + self.length)
        if len(data) != _BLOCK + self.length:
            raise OSError(errno.EIO, "the shard ends within this member", self.shard)
        return data[_BLOCK:]

    def verify(self) -> None:
        """Whether the shard still has this member there, by its header alone."""
        self._read(_BLOCK)

    def open(self) -> io.BytesIO:
        """A file of the content alone."""
        return io.BytesIO(self.read_view())

    def _read(self, length: int) -> memoryview:
        """So many bytes from the header on."""
        with open_regular(self.shard) as file:
            data = memoryview(os.pread(file.fileno(), length, max(self.offset - _BLOCK, 0)))
        if not _is_header_of(bytes(data[:_BLOCK]), self.name, self.length):
            raise OSError(errno.ESTALE, "the shard has changed since it was listed", self.shard)
        return data


def _is_header_of(block: bytes, name: str, length: int) -> bool:
    """Whether the block before a content is the header of this file."""
    try:
        header = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    # Longer and other names stand in an extension before it, of which this one is a shadow.
    extended = len(name) > 100 or not name.isascii()
    return header.size == length and (extended or header.name == name)


def tar_entries(path: str) -> Iterator[Entry]:
    """Everything in an uncompressed tar, in order, from its headers alone.

    Raises:
        UserError: it cannot be read, is compressed, damaged, cut short, or goes on after its end.
    """
    try:
        with open_regular(path) as file, tarfile.open(path, "r:", errors="surrogateescape") as tar:
            total = os.fstat(file.fileno()).st_size
            for info in tar:
                regular = info.type in _REGULAR and not info.issparse()
                kind = FILE if regular else FOLDER if info.isdir() else SPECIAL
                if kind == FILE and not _is_header_of(
                    os.pread(file.fileno(), _BLOCK, info.offset_data - _BLOCK), info.name, info.size
                ):
                    raise UserError(
                        f"{path}: member {printable(info.name)} has an odd header, by which a "
                        "change could not be noticed; write the shard with GNU tar or tarfile"
                    )
                if kind == FILE and not 0 <= info.size <= total - info.offset_data:
                    raise UserError(
                        f"{path}: damaged, cut short within {printable(info.name)}; copy it again"
                    )
                yield Entry(info.name, kind, info.offset_data, info.size)
                tar.members.clear()  # type: ignore[attr-defined]  # a shard may hold millions
            _check_end(path, file, tar.offset)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None
    except UserError:
        raise
    except (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError) as error:
        raise UserError(
            f"{path}: damaged, cut short or no uncompressed tar ({error}); copy or write it again; "
            "decompress a compressed one, members are read by offset"
        ) from None


def _check_end(path: str, file: io.BufferedReader, position: int) -> None:
    """Zeros up to the end of the file, or it is damaged, or another tar would be overlooked."""
    file.seek(position)
    empty = True
    while chunk := file.read(1 << 20):
        empty = False
        if chunk.count(0) != len(chunk):
            raise UserError(f"{path}: damaged, or goes on after its end, at byte {position}")
    if empty:
        raise UserError(f"{path}: cut short, its end mark is missing; copy it again")
