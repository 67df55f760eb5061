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
from typing import Literal

from simpro_fast.utils.errors import UserError
from simpro_fast.utils.printable import printable
from simpro_fast.utils.regular_file import open_regular

_BLOCK = 512
_LONGEST_EXTENSION = 1 << 16
"""Bytes of a long name or of pax records; more is no name of an image."""
_ENDLESS = "an endless name"
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
FILE, FOLDER = "file", "folder"
_KINDS = {
    b"\0": FILE,
    b"0": FILE,
    b"7": FILE,
    b"5": FOLDER,
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "device",
    b"4": "device",
    b"6": "pipe",
    b"S": "sparse file",
}
_DAMAGES = (tarfile.TarError, ValueError, IndexError, OverflowError, RecursionError)
"""Exceptions of `tarfile` on headers that are none."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One member as its header describes it."""

    name: str
    kind: str
    """`file`, `folder`, or what else it is: `hard link`, `symbolic link`, `sparse file`, ..."""
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
        with open_regular(self.shard) as file:
            start = self.offset - _BLOCK
            data = memoryview(os.pread(file.fileno(), _BLOCK + self.length, max(start, 0)))
        self._verify(bytes(data[:_BLOCK]))
        if len(data) != _BLOCK + self.length:
            raise OSError(errno.EIO, "the shard ends within this member", self.shard)
        return data[_BLOCK:]

    def verify(self) -> None:
        """Whether the shard still has this member there, by its header alone."""
        self.open().close()

    def open(self, mode: Literal["rb"] = "rb") -> io.BufferedReader:
        """A file of the content alone; reads from the disk what is asked for."""
        file = open_regular(self.shard)  # the reader closes it
        try:
            self._verify(os.pread(file.fileno(), _BLOCK, max(self.offset - _BLOCK, 0)))
        except BaseException:
            file.close()
            raise
        return io.BufferedReader(_Window(file, self.offset, self.length))

    def _verify(self, block: bytes) -> None:
        try:
            header = _Header.frombuf(block, "utf-8", "surrogateescape")
        except _DAMAGES:
            header = None
        if header is None or not header.is_of(self.name, self.length):
            raise OSError(errno.ESTALE, "the shard has changed since it was listed", self.shard)


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.BufferedReader, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._position, self._length)[whence]
        self._position = max(start + offset, 0)
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), max(self._length - self._position, 0))
        data = os.pread(self._file.fileno(), wanted, self._offset + self._position)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _Header(tarfile.TarInfo):
    """A header that remembers the name and the length of its own block."""

    own_name: str
    own_length: int

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Header:
        header = super().frombuf(buf, encoding, errors)
        if header.type in b"LKxgX" and not 0 <= header.size <= _LONGEST_EXTENSION:
            raise tarfile.HeaderError(_ENDLESS)
        if buf[257:263] != b"ustar\0":  # GNU has times where POSIX has the start of the name
            header.name = buf[:100].partition(b"\0")[0].decode(encoding, errors)
        header.own_name, header.own_length = header.name, header.size
        return header

    def has_records(self, file: io.BufferedReader) -> bool:
        """Whether pax records before it, if any, could be read; `tarfile` overlooks odd ones."""
        extended = self.offset_data - self.offset > _BLOCK and not self.pax_headers
        return not extended or os.pread(file.fileno(), 1, self.offset + 156) != b"x"

    def is_of(self, name: str, length: int) -> bool:
        """Whether its own block is that of this file."""
        if _KINDS.get(self.type) != FILE or self.own_length != length:
            return False
        # Longer and other names stand in an extension before it, of which this one is a shadow.
        return self.own_name == name or len(name) > 100 or not name.isascii()


def tar_entries(path: str) -> Iterator[Entry]:
    """Everything in an uncompressed tar, in order, from its headers alone.

    Raises:
        UserError: it cannot be read, is compressed, damaged, cut short, or goes on after its end.
    """
    try:
        with open_regular(path) as file:
            yield from _entries(file, path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _entries(file: io.BufferedReader, path: str) -> Iterator[Entry]:
    total = os.fstat(file.fileno()).st_size
    start = os.pread(file.fileno(), 8, 0)
    if not start:
        raise UserError(f"{path}: empty file; write it again")
    for magic, method in _COMPRESSED.items():
        if start.startswith(magic):
            raise compressed(path, method)
    tar: tarfile.TarFile | None = None
    position, fault = 0, ""
    while True:
        try:
            tar = tar or tarfile.TarFile(
                fileobj=file, tarinfo=_Header, encoding="utf-8", errors="surrogateescape"
            )
            header = tar.next()
        except _DAMAGES as error:
            header, fault = None, str(error)
        whole = isinstance(header, _Header) and header.size >= 0 and header.has_records(file)
        if tar is None or not isinstance(header, _Header) or not whole:
            return _check_end(path, file.fileno(), position, fault)
        name, content = header.name, header.offset_data
        kind = "sparse file" if header.issparse() else _KINDS.get(header.type, "special entry")
        if kind == FILE and name.endswith("/"):
            kind = FOLDER  # as written before there was a type for it
        if kind == FILE and not header.is_of(name, header.size):
            raise UserError(
                f"{path}: member {printable(name)} has an odd header, by which a change could not "
                "be noticed; write the shard with GNU tar or Python's tarfile"
            )
        # Links and devices have no content, whatever their header says.
        end = content + (0 if header.type in b"123456" else header.size)
        if end > total and kind != "sparse file":
            raise UserError(
                f"{path}: cut short within member {printable(name)} "
                f"({total} bytes, {end} needed); copy it again"
            )
        yield Entry(name, kind, content, header.size)
        position = tar.offset
        tar.members.clear()  # type: ignore[attr-defined]  # a shard may hold millions


def compressed(path: str, method: str) -> UserError:
    """The refusal of a compressed tar."""
    return UserError(
        f"{path}: compressed ({method}); members are read by offset, which needs a plain .tar: "
        "decompress it (images are compressed already, so it hardly grows)"
    )


def _check_end(path: str, fd: int, position: int, fault: str) -> None:
    """Zeros up to the end of the file, or it is damaged, or another tar would be overlooked."""
    block = os.pread(fd, _BLOCK, position)
    if not block:
        raise UserError(
            f"{path}: cut short, its end mark is missing; copy it again (if it is whole, add the "
            "mark: head -c 1024 /dev/zero >> FILE)"
        )
    if block.count(0) != _BLOCK:
        pax = block[156:157] in (b"x", b"g")
        reason = fault if fault == _ENDLESS else "pax records" if pax else "no tar header"
        where = f" at byte {position}" if position or pax else ""
        raise UserError(f"{path}: damaged{where} ({reason}); copy or write it again")
    while chunk := os.pread(fd, 1 << 20, position):
        if chunk.count(0) != len(chunk):
            raise UserError(
                f"{path}: goes on after its end mark; join tars with `tar --concatenate`, not cat"
            )
        position += len(chunk)
