"""Files that a long run writes: partial until they are whole, with a journal to go on from.

`F.csv` grows as `F.csv.partial`. Beside it `F.csv.journal` has a line of JSON with the key of the
run, then one for every append: rows, what the caller wants to know again, and of each partial file
its length and the CRC of all of it. A run that goes on keeps what agrees with the journal and cuts
off the rest, so that neither a kill nor a power cut between two writes leaves a wrong row.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from types import TracebackType
from typing import Any

from simpro_fast.errors import ConfigError, UserError
from simpro_fast.inference.writers import Columns, Format
from simpro_fast.utils.atomic_write import check_output, unwritable
from simpro_fast.utils.file_lock import locked
from simpro_fast.utils.regular_file import no_file, open_regular, read_regular

_BLOCK = 1 << 20
_LONGEST = 60


class Outputs:
    """Output files that appear together, whole, when `finish` is called.

    As a context: on the way out without `finish`, partial files stay if there is a key, else they
    are removed.

    Args:
        files: each file and its format.
        key: what the content depends on, strict JSON; None: a run that cannot go on.
        resume: go on where an interrupted run with the same key stopped, if there is one.
        overwrite: replace finished files, and drop what an interrupted run left.

    Raises:
        ConfigError: `resume` after a run with another key; names what differs.
        UserError: a finished file or an interrupted run is there and may not be touched, another
            process is writing, or a file cannot be written.
    """

    def __init__(
        self,
        files: Mapping[Path, Format],
        key: Mapping[str, Any] | None,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        self._key = None if key is None else json.loads(json.dumps(key))
        self._formats = list(files.values())
        self._final = list(files)
        self._files = [_Partial(path.with_name(f"{path.name}.partial")) for path in files]
        first = self._final[0]
        self._journal = first.with_name(f"{first.name}.journal")
        self._stack = ExitStack()
        self._owned = False
        self.rows = 0
        """Rows that are written."""
        self.finished = False
        """Whether all rows are, and `finish` alone is left to do: it was killed there."""
        self.records: list[dict[str, Any]] = []
        """What earlier runs passed to `append`, oldest first."""
        try:
            self._lock()
            self._begin(resume=resume, overwrite=overwrite)
        except BaseException:
            self.close()
            raise

    def append(self, columns: Columns, record: Mapping[str, Any]) -> None:
        """Append rows to every file.

        Args:
            record: for `records` of a run that goes on; strict JSON.

        Raises:
            UserError: the disk refuses them.
        """
        for file, form in zip(self._files, self._formats, strict=True):
            file.append(form.encode(columns))
        self.rows += len(next(iter(columns.values())))
        self._note({"rows": self.rows, "record": record, "files": [f.state for f in self._files]})

    def finish(self) -> None:
        """Give the files their names. Raises `UserError` where the disk refuses."""
        state = [file.state for file in self._files]
        self._note({"rows": self.rows, "record": {}, "files": state, "finished": True})
        for file, form, final in zip(self._files, self._formats, self._final, strict=True):
            file.close()
            with _writing(final):
                form.finish(file.path, final, self.rows)
        self._journal.unlink(missing_ok=True)
        self._owned = False

    def close(self) -> None:
        """Close what is open; remove what nobody could go on from."""
        for file in self._files:
            file.close()
        if self._owned and not (self._key and self.rows):
            for path in (*(file.path for file in self._files), self._journal):
                path.unlink(missing_ok=True)
        self._stack.close()

    def __enter__(self) -> Outputs:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _lock(self) -> None:
        for path in self._final:
            check_output(path)
        cure = "choose another --output"
        try:
            self._stack.enter_context(locked(self._journal, cure, wait=False))
        except BlockingIOError:
            raise UserError(
                f"{self._final[0]}: another process is writing it; wait for it, or {cure}"
            ) from None

    def _begin(self, *, resume: bool, overwrite: bool) -> None:
        key, lines = _read_journal(self._journal)
        interrupted = bool(lines) and not overwrite
        if interrupted and not (resume and self._key):
            raise UserError(
                f"{self._journal}: an earlier run stopped after {lines[-1].rows:,} images; "
                "--resume goes on, --overwrite starts anew"
            )
        if interrupted:
            self._check_key(key)
        for path in self._final:
            # An interrupted run began with the right to replace it.
            if os.path.lexists(path) and not (overwrite or interrupted):
                self._owned = True  # of the lock alone
                raise UserError(
                    f"{path}: exists already; give another name, or --overwrite to replace it"
                )
        self._owned = True
        good = len(lines) if interrupted else 0
        self.finished = bool(good) and lines[-1].finished
        if not self.finished:
            for i, file in enumerate(self._files):
                good = min(good, file.agreeing([line.files[i] for line in lines[:good]]))
        kept = lines[:good]
        with _writing(self._journal):
            self._log = self._journal.open("r+b")
            self._stack.callback(_close, self._log)
            self._log.truncate(kept[-1].end if kept else 0)
            self._log.seek(0, os.SEEK_END)
        if kept:
            self.rows = kept[-1].rows
            self.records = [line.record for line in kept if not line.finished]
        if self.finished:
            return
        if not kept:
            self._note({"key": self._key})
        for i, (file, form) in enumerate(zip(self._files, self._formats, strict=True)):
            file.open(*(kept[-1].files[i] if kept else (0, 0)))
            if not kept:
                file.append(form.head())

    def _check_key(self, found: Mapping[str, Any]) -> None:
        own = self._key or {}
        names = [*own, *(name for name in found if name not in own)]
        if other := [name for name in names if found.get(name) != own.get(name)]:
            shown = ", ".join(
                f"{name} ({_short(found.get(name))} then, {_short(own.get(name))} now)"
                for name in other
            )
            raise ConfigError(
                f"{self._journal}: the run that stopped had another {shown}; give the same, or "
                "--overwrite to start anew"
            )

    def _note(self, line: Mapping[str, Any]) -> None:
        with _writing(self._journal):
            self._log.write(json.dumps(line).encode() + b"\n")
            self._log.flush()


class _Partial:
    """A file that grows at its end, with its length and CRC."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BufferedRandom | None = None
        self._length = self._crc = 0

    @property
    def state(self) -> tuple[int, int]:
        """Bytes, and the CRC-32 of all of them."""
        return self._length, self._crc

    def agreeing(self, states: Sequence[tuple[int, int]]) -> int:
        """How many of these states the file has gone through, from the first on."""
        if no_file(self.path):
            return 0
        length = crc = 0
        with open_regular(self.path) as file:
            for number, (end, wanted) in enumerate(states):
                while length < end and (data := file.read(min(end - length, _BLOCK))):
                    crc, length = zlib.crc32(data, crc), length + len(data)
                if (length, crc) != (end, wanted):
                    return number
        return len(states)

    def open(self, length: int, crc: int) -> None:
        """Go on after `length` bytes, which have this CRC."""
        with _writing(self.path):
            self._file = self.path.open("r+b" if length else "w+b")
            self._file.truncate(length)
            self._file.seek(length)
        self._length, self._crc = length, crc

    def append(self, data: bytes) -> None:
        assert self._file is not None
        with _writing(self.path):
            self._file.write(data)
            self._file.flush()
        self._length, self._crc = self._length + len(data), zlib.crc32(data, self._crc)

    def close(self) -> None:
        if self._file is not None:
            _close(self._file)


@dataclass(frozen=True)
class _Line:
    """Of a journal."""

    rows: int
    record: dict[str, Any]
    files: list[tuple[int, int]]
    finished: bool
    end: int
    """Bytes of the journal up to here."""


def _read_journal(path: Path) -> tuple[dict[str, Any], list[_Line]]:
    """Its key and the lines that are whole; no line where the key is not."""
    key: dict[str, Any] | None = None
    lines: list[_Line] = []
    end = 0
    for text in read_regular(path).splitlines(keepends=True):
        end += len(text)
        try:
            value = json.loads(text)
            if key is None:
                key = dict(value["key"] or {})
                continue
            files = [(int(length), int(crc)) for length, crc in value["files"]]
            finished = bool(value.get("finished", False))
            lines.append(_Line(value["rows"], value["record"], files, finished, end))
        except (ValueError, TypeError, KeyError):
            break
    return key or {}, lines


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _close(file: BufferedRandom) -> None:
    with suppress(OSError):  # of a disk that has refused the same before
        file.close()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from None
