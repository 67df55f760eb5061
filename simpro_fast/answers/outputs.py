"""Files that a long run writes: partial until they are whole, with a journal to go on from.

`F.csv` grows as `F.csv.partial`. Beside it `F.csv.journal` has a line of JSON with the key of the
run, then one for every append: rows, what the caller wants to know again, and of each partial file
its length and the CRC of all of it. A run that goes on keeps what agrees with the journal and cuts
off the rest, so that neither a kill nor a power cut between two writes leaves a wrong row.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path
from typing import Any

from simpro_fast.answers.writers import Columns, Format
from simpro_fast.utils.atomic_write import unwritable
from simpro_fast.utils.claimed_files import State, check_new, check_same, claimed
from simpro_fast.utils.errors import ConfigError, UserError
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
        check: called with each file that is to be replaced; raises where it must stay.

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
        check: Callable[[Path], None] = lambda path: None,
    ) -> None:
        self._key = None if key is None else json.loads(json.dumps(key))
        self._files = [_Partial(path, form) for path, form in files.items()]
        first = self._files[0].final
        self._journal = first.with_name(f"{first.name}.journal")
        self._stack = ExitStack()
        self._owned = False
        self.rows = 0
        """Rows that are written."""
        self.finished = False
        """Whether all rows are, and `finish` alone is left to do: it was killed there."""
        self.records: list[dict[str, Any]] = []
        """Records that earlier runs passed to `append`, oldest first."""
        try:
            self._found = self._stack.enter_context(claimed(files))
            self._begin(self._permitted(resume, overwrite, check))
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
        for file in self._files:
            file.append(file.format.encode(columns))
        self.rows += len(next(iter(columns.values())))
        self._note({"rows": self.rows, "record": record, "files": [f.state for f in self._files]})

    def finish(self) -> None:
        """Give the files their names.

        Raises:
            UserError: the disk refuses, or there is another file by now than the one that was to
                be replaced.
        """
        self._check_same()
        state = [file.state for file in self._files]
        self._note({"rows": self.rows, "record": {}, "files": state, "finished": True})
        for file in self._files:
            file.close()
            with _writing(file.final):
                file.format.finish(file.path, file.final, self.rows)
        self._owned = False
        self._journal.unlink(missing_ok=True)

    def close(self) -> None:
        """Close what is open; remove what nobody could go on from."""
        for file in self._files:
            file.close()
        if self._owned and not (self._key and self.rows):
            for file in self._files:
                file.path.unlink(missing_ok=True)
            self._journal.unlink(missing_ok=True)
        self._stack.close()

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _permitted(
        self, resume: bool, overwrite: bool, check: Callable[[Path], None]
    ) -> list[_Line]:
        """Return what to resume from, once it is sure that this run may write all of its files."""
        journal = _read_journal(self._journal)
        lines = [] if overwrite or not journal.key else journal.lines
        if lines and not (resume and self._key):
            raise UserError(
                f"{self._journal}: a run stopped after {lines[-1].rows:,} images; the same command "
                "with --resume goes on, --overwrite starts anew"
            )
        if lines:
            self._check_key(journal.key)
            # It may replace what was there when it began, whatever has come since.
            self._found = {path: journal.found.get(path.name) for path in self._found}
        elif not overwrite:
            check_new(self._found)
        for path, state in self._found.items():
            if state is not None:
                check(path)
        self.finished = bool(lines) and lines[-1].finished
        self._check_same()
        return lines

    def _begin(self, lines: Sequence[_Line]) -> None:
        """Remove what a killed run left, and open what is to grow."""
        self._owned = True
        kept = lines[: self._agreeing(lines)]
        with _writing(self._journal):
            self._log = self._journal.open("a+b")
            self._stack.callback(_close, self._log)
            self._log.truncate(kept[-1].end if kept else 0)
        if kept:
            self.rows = kept[-1].rows
            self.records = [line.record for line in kept if not line.finished]
        if self.finished:
            return
        if not kept:
            found = {path.name: state for path, state in self._found.items()}
            self._note({"key": self._key, "found": found})
        for i, file in enumerate(self._files):
            file.open(*(kept[-1].files[i] if kept else (0, 0)))
            if not kept:
                file.append(file.format.head())

    def _agreeing(self, lines: Sequence[_Line]) -> int:
        """How many lines of the journal the partial files agree with, from the first on."""
        good = len(lines)
        if not self.finished:
            for i, file in enumerate(self._files):
                good = min(good, file.agreeing([line.files[i] for line in lines[:good]]))
        return good

    def _check_same(self) -> None:
        """Check the files that are still to get their names."""
        waiting = (f.final for f in self._files if not self.finished or f.path.exists())
        check_same({path: self._found[path] for path in waiting})

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
    """A file that grows at its end, with its length and CRC, until it gets its final name."""

    def __init__(self, final: Path, form: Format) -> None:
        self.final, self.format = final, form
        self.path = final.with_name(f"{final.name}.partial")
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
    """Line of a journal."""

    rows: int
    record: dict[str, Any]
    files: list[tuple[int, int]]
    finished: bool
    end: int
    """Bytes of the journal up to here."""


@dataclass
class _Journal:
    """Journal as far as its lines are complete; without its key it has no lines."""

    key: dict[str, Any] = field(default_factory=dict)
    found: dict[str, State] = field(default_factory=dict)
    """States of the final names when the run began."""
    lines: list[_Line] = field(default_factory=list)


def _read_journal(path: Path) -> _Journal:
    journal, end = _Journal(), 0
    if no_file(path):
        return journal
    for number, text in enumerate(read_regular(path).splitlines(keepends=True)):
        end += len(text)
        try:
            value = json.loads(text)
            if number == 0:
                journal.key, journal.found = dict(value["key"] or {}), dict(value["found"])
                continue
            files = [(int(length), int(crc)) for length, crc in value["files"]]
            finished = bool(value.get("finished", False))
            journal.lines.append(_Line(value["rows"], value["record"], files, finished, end))
        except (ValueError, TypeError, KeyError):
            break
    return journal


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
