"""Files that a long run writes: in numbered parts, which are joined when all of them are there.

The parts of `F.csv` (and of the files written with it) are in the folder `F.csv.parts`. Every
append writes the bytes of each file, `<n>.<i>`, and then `<n>.json`: rows, lengths, and what the
caller wants to know again. A run that goes on keeps the parts up to the first that is not whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from simpro_fast.answers.writers import Columns, Format
from simpro_fast.utils.atomic_write import read_json, replacing, unwritable
from simpro_fast.utils.claimed_files import State, check_new, check_same, claimed
from simpro_fast.utils.errors import ConfigError, UserError

_START = "start.json"
_LONGEST = 60


class Outputs:
    """Output files that appear together, whole, when `finish` is called.

    As a context: on the way out without `finish`, the parts stay if there is a key, else they are
    removed.

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
        self._files = dict(files)
        first = next(iter(files))
        self.parts = first.with_name(f"{first.name}.parts")
        self.rows, self._count, self._owned = 0, 0, False
        self.records: list[dict[str, Any]] = []
        """Records that earlier runs passed to `append`, oldest first."""
        self._stack = ExitStack()
        try:
            self._found = self._stack.enter_context(claimed(files))
            self._begin(resume, overwrite, check)
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
        parts = [form.encode(columns) for form in self._files.values()]
        for i, part in enumerate(parts):
            self._write(f"{self._count}.{i}", part)
        rows = len(next(iter(columns.values())))
        note = {"rows": rows, "sizes": list(map(len, parts)), "record": record}
        self._write(f"{self._count}.json", json.dumps(note).encode())
        self.rows, self._count = self.rows + rows, self._count + 1

    def finish(self) -> None:
        """Join the parts, and give the files their names.

        Raises:
            UserError: the disk refuses, or there is another file by now than the one that was to
                be replaced.
        """
        check_same(self._found)
        joined = {path: path.with_name(f"{path.name}.partial") for path in self._files}
        for i, (path, form) in enumerate(self._files.items()):
            with _writing(path), joined[path].open("wb") as out:
                out.write(form.head())
                for number in range(self._count):
                    with (self.parts / f"{number}.{i}").open("rb") as part:
                        shutil.copyfileobj(part, out)
        self._write(_START, json.dumps({"key": self._key, "found": {}}).encode())
        for path, form in self._files.items():
            with _writing(path):
                form.finish(joined[path], path, self.rows)
        shutil.rmtree(self.parts)
        self._owned = False

    def close(self) -> None:
        """Remove what nobody could go on from, and let other runs have the files."""
        if self._owned and not (self._key and self.rows):
            shutil.rmtree(self.parts, ignore_errors=True)
        self._stack.close()

    def __enter__(self) -> Outputs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, resume: bool, overwrite: bool, check: Callable[[Path], None]) -> None:
        """Read what an interrupted run has left, once it is sure that this one may go on."""
        start = {} if overwrite else _json(self.parts / _START)
        notes = list(self._notes()) if start.get("key") else []
        rows = sum(note["rows"] for note in notes)
        if notes and not (resume and self._key):
            raise UserError(
                f"{self.parts}: a run stopped after {rows:,} images; the same command with "
                "--resume goes on, --overwrite starts anew"
            )
        if notes:
            self._check_key(start["key"])
            # It may replace what was there when it began, whatever has come since; one that was
            # killed while it gave the names has replaced some itself.
            found: dict[str, State] = start["found"]
            self._found = {p: found[p.name] for p in self._found if p.name in found}
        elif not overwrite:
            check_new(self._found)
        for path, state in self._found.items():
            if state is not None:
                check(path)
        check_same(self._found)
        self._owned = True
        self.rows, self._count = rows, len(notes)
        self.records = [note["record"] for note in notes]
        if not notes:
            shutil.rmtree(self.parts, ignore_errors=True)
            found = {path.name: state for path, state in self._found.items()}
            self._write(_START, json.dumps({"key": self._key, "found": found}).encode())

    def _notes(self) -> Iterator[dict[str, Any]]:
        """Those of all parts up to the first that is not whole, as a power cut may leave it."""
        number = 0
        while note := _json(self.parts / f"{number}.json"):
            paths = [self.parts / f"{number}.{i}" for i in range(len(self._files))]
            if [p.stat().st_size if p.is_file() else -1 for p in paths] != note["sizes"]:
                return
            yield note
            number += 1

    def _check_key(self, found: Mapping[str, Any]) -> None:
        own = self._key or {}
        names = dict.fromkeys([*own, *found])
        if other := [name for name in names if found.get(name) != own.get(name)]:
            shown = ", ".join(
                f"{name} ({_short(found.get(name))} then, {_short(own.get(name))} now)"
                for name in other
            )
            raise ConfigError(
                f"{self.parts}: the run that stopped had another {shown}; give the same, or "
                "--overwrite to start anew"
            )

    def _write(self, name: str, content: bytes) -> None:
        with replacing(self.parts / name, durable=False) as file:
            file.write(content)


def _json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is none."""
    try:
        return read_json(path)
    except UserError:
        return {}


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(path, error) from None
