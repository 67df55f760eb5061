"""Output files of a verb: written by one process at a time, and replaced only as they were found.

Nothing is replaced unasked, and nothing that appeared or changed while the verb was at work, such
as a table into which somebody has typed meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from simpro_fast.utils.atomic_write import check_output
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_lock import locked

State = list[int] | None
"""State of a name: bytes and time of the last change (ns); None: no file. Strict JSON."""
_CURE = "choose another --output"


@contextmanager
def claimed(files: Iterable[Path]) -> Iterator[dict[Path, State]]:
    """Hold the files against other processes that claim any of them; yields what is there.

    They are locked in the order of their paths, so that of two runs that share some, one goes on.

    Raises:
        UserError: another process holds one.
        OutputError: one cannot be written.
    """
    files = list(files)
    with ExitStack() as stack:
        for path in sorted(files, key=os.path.abspath):
            check_output(path)
            lock = path.with_name(f".{path.name}.lock")
            try:
                stack.enter_context(locked(lock, _CURE, wait=False, remove=True))
            except BlockingIOError:
                raise UserError(
                    f"{path}: another process is writing it; wait for it, or {_CURE}"
                ) from None
        yield {path: _state(path) for path in files}


def check_new(found: Mapping[Path, State]) -> None:
    """Raise `UserError` where there was a file, which nobody has asked to replace."""
    for path, state in found.items():
        if state is not None:
            raise UserError(
                f"{path}: exists already; give another name, or --overwrite to replace it"
            )


def check_same(found: Mapping[Path, State]) -> None:
    """Raise `UserError` where by now there is another file than was found."""
    for path, state in found.items():
        if _state(path) not in (state, None):
            raise UserError(
                f"{path}: was changed by somebody else since this run began, and is left as it is; "
                "move it away and run this again"
            )


def _state(path: Path) -> State:
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return None
    return [found.st_size, found.st_mtime_ns]
