"""Members of uncompressed tar files: found once by their headers, then read by offset.

Read are POSIX ustar and pax (IEEE Std 1003.1-2008, pax "Interchange Format"), the older headers
without magic, and GNU's long names and base-256 numbers. Names are text to show and to compare:
nothing is ever unpacked, so no name becomes a path. A file that is cut short or goes on after its
end is refused; `tarfile` would take what lies before the break for the whole.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from simpro_fast.errors import UserError

_BLOCK = 512
_LONGEST_EXTENSION = 1 << 16
"""Bytes of a long name or of pax records; more is no name of an image."""
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


@dataclass(frozen=True, slots=True)
class Entry:
    """One member as its header describes it."""

    name: str
    kind: str
    """`file`, `folder`, or what else it is: `hard link`, `symbolic link`, `sparse file`, ..."""
    offset: int
    """Of the content, in bytes from the start of the tar."""
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
        with open(self.shard, "rb", buffering=0) as file:
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
        file = open(self.shard, mode, buffering=0)  # noqa: SIM115 (the reader closes it)
        try:
            self._verify(os.pread(file.fileno(), _BLOCK, max(self.offset - _BLOCK, 0)))
        except BaseException:
            file.close()
            raise
        return io.BufferedReader(_Window(file, self.offset, self.length))

    def _verify(self, block: bytes) -> None:
        if not _describes(_parse(block), self.name, self.length):
            raise OSError(errno.ESTALE, "the shard has changed since it was listed", self.shard)


class _Window(io.RawIOBase):
    """A part of a file as a file."""

    def __init__(self, file: io.FileIO, offset: int, length: int) -> None:
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


def printable(name: str) -> str:
    """A member's name on one line of a terminal, whatever bytes it is made of."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in name)


def tar_entries(path: str) -> Iterator[Entry]:
    """Everything in an uncompressed tar, in order, from its headers alone.

    Raises:
        UserError: it cannot be read, is compressed, damaged, cut short, or goes on after its end.
    """
    try:
        with Path(path).open("rb", buffering=0) as file:
            yield from _entries(file.fileno(), path)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions"
        ) from None


def _entries(fd: int, path: str) -> Iterator[Entry]:
    total = os.fstat(fd).st_size
    start = os.pread(fd, 8, 0)
    for magic, method in _COMPRESSED.items():
        if start.startswith(magic):
            raise compressed(path, method)
    position = 0
    name: str | None = None  # from an extension header, for the next member
    length: int | None = None
    sparse = False
    while block := os.pread(fd, _BLOCK, position):
        if block.count(0) == _BLOCK:
            _check_end(fd, path, position)
            return
        header = _parse(block)
        if header is None:
            where = f" at byte {position}" if position else ""
            raise UserError(f"{path}: damaged{where} (no tar header); copy or write it again")
        content = position + _BLOCK
        if header.kind in b"LKxg":
            if header.length > _LONGEST_EXTENSION:
                raise UserError(f"{path}: damaged at byte {position} (an endless name)")
            data = os.pread(fd, header.length, content)
            if header.kind == b"L":
                name = _text(data)
            elif header.kind in b"xg":
                records = _pax_records(data)
                size = "0" if records is None else records.get("size", "0")
                everywhere = header.kind == b"g" and records and {"path", "size"} & records.keys()
                if records is None or everywhere or not (size.isascii() and size.isdigit()):
                    raise UserError(f"{path}: damaged at byte {position} (pax records)")
                if header.kind == b"x":
                    name = records.get("path", name)
                    length = int(size) if "size" in records else None
                    sparse = any(key.startswith("GNU.sparse.") for key in records)
            position = content + _padded(header.length)
            continue
        kind = "sparse file" if sparse else _KINDS.get(header.kind, "special entry")
        found = name if name is not None else header.name
        if kind == FILE and found.endswith("/"):
            kind = FOLDER  # as written before there was a type for it
        size_here = header.length if length is None else length
        if kind == FILE and not _describes(header, found, size_here):
            raise UserError(
                f"{path}: member {printable(found)} has an odd header, by which a change could not "
                "be noticed; write the shard with GNU tar or Python's tarfile"
            )
        # Links and devices have no content, whatever their header says.
        held = 0 if header.kind in b"123456" else size_here
        if content + held > total:
            raise UserError(
                f"{path}: cut short within member {printable(found)} "
                f"({total} bytes, {content + held} needed); copy it again"
            )
        yield Entry(found, kind, content, size_here)
        position = content + _padded(held)
        name, length, sparse = None, None, False
    raise UserError(
        f"{path}: cut short, its end mark is missing; copy it again (if it is whole, add the mark: "
        "head -c 1024 /dev/zero >> FILE)"
        if total
        else f"{path}: empty file; write it again"
    )


def compressed(path: str, method: str) -> UserError:
    """The refusal of a compressed tar."""
    return UserError(
        f"{path}: compressed ({method}); members are read by offset, which needs a plain .tar: "
        "decompress it (images are compressed already, so it hardly grows)"
    )


def _check_end(fd: int, path: str, position: int) -> None:
    """Zeros up to the end of the file, or another tar was appended and would be overlooked."""
    while chunk := os.pread(fd, 1 << 20, position):
        if chunk.count(0) != len(chunk):
            raise UserError(
                f"{path}: goes on after its end mark; join tars with `tar --concatenate`, not cat"
            )
        position += len(chunk)


@dataclass(frozen=True, slots=True)
class _Header:
    name: str
    kind: bytes
    length: int


def _parse(block: bytes) -> _Header | None:
    """One header block; None where it is none."""
    if len(block) != _BLOCK:
        return None
    checksum, length = _number(block[148:156]), _number(block[124:136])
    if checksum is None or length is None:
        return None
    total = sum(block) - sum(block[148:156]) + 8 * 32
    if checksum != total:
        # Some old writers summed signed bytes.
        signed = total - 256 * sum(byte > 127 for byte in block[:148] + block[156:])
        if checksum != signed:
            return None
    name = _text(block[:100])
    if block[257:263] == b"ustar\0" and block[345]:  # GNU's magic differs; it has no prefix
        name = f"{_text(block[345:500])}/{name}"
    return _Header(name, block[156:157], length)


def _describes(header: _Header | None, name: str, length: int) -> bool:
    """Whether a header is that of this file."""
    if header is None or header.length != length or _KINDS.get(header.kind) != FILE:
        return False
    # Longer and other names stand in an extension before it, of which this one is a shadow.
    return header.name == name or len(name) > 100 or not name.isascii()


def _number(field: bytes) -> int | None:
    """Octal digits, or GNU's base 256 for what they cannot hold; None where it is neither."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\0")[0].strip(b" ")
    if not digits:
        return 0
    return int(digits, 8) if digits.isdigit() and not digits.strip(b"01234567") else None


def _text(field: bytes) -> str:
    return field.partition(b"\0")[0].decode("utf-8", "surrogateescape")


def _pax_records(data: bytes) -> dict[str, str] | None:
    """`length key=value` lines; None where they are not."""
    records = {}
    while data.strip(b"\0"):
        digits = data.partition(b" ")[0]
        length = int(digits) if digits.isdigit() and len(digits) < 10 else 0
        record, data = data[:length], data[length:]
        key, equals, value = record[len(digits) + 1 :].partition(b"=")
        if not (equals and value.endswith(b"\n")) or len(record) != length or b"\0" in key + value:
            return None
        records[key.decode("utf-8", "replace")] = value[:-1].decode("utf-8", "surrogateescape")
    return records


def _padded(length: int) -> int:
    return -(-length // _BLOCK) * _BLOCK
