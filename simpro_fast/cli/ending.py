"""How a verb ends: one line and an exit code for everything that a user can cure."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from types import FrameType

from simpro_fast.distributed.signals import INTERRUPTED
from simpro_fast.utils.atomic_write import FULL, unwritable
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.printable import show

WHOLE = "interrupted; files are whole"
DONE, FAILED, USAGE = 0, 1, 2

Body = Callable[[Sequence[str] | None], int]


def verb(body: Body) -> Body:
    """Let `body(arguments)` return its exit code and raise what users can cure.

    A `UserError`, an `OSError`, Ctrl-C and a reader that has gone (`... | head`) become one line on
    stderr and the exit code: 1, or 2 for usage (`ConfigError`) and outputs that cannot be written
    (`OutputError`), 130 for Ctrl-C.
    """

    @wraps(body)
    def main(arguments: Sequence[str] | None = None) -> int:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):  # file names may be no text at all
                stream.reconfigure(errors="backslashreplace")
        with _interrupts() as seen:
            try:
                code = body(arguments)
                sys.stdout.flush()  # a pipe that has broken is noticed here, not at the exit
                return _say(WHOLE, INTERRUPTED) if seen else code
            except KeyboardInterrupt as error:  # a verb may say what it leaves behind
                return _say(str(error) or WHOLE, INTERRUPTED)
            except Exception as error:
                if seen:  # a library has made an error of its own of it
                    return _say(WHOLE, INTERRUPTED)
                return explained(error)

    return main


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Ctrl-C as usual, and a note of it that no library can swallow or turn into another error."""
    seen: list[int] = []
    usual = threading.current_thread() is threading.main_thread() and (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not usual:  # ignored, or another program's
        yield seen
        return

    def interrupt(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def explained(error: Exception, where: str = "") -> int:
    """Say in one line what a user can cure; anything else is raised again.

    Args:
        where: follows the word "error", such as " [rank 3]".

    Returns:
        the exit code.
    """
    if isinstance(error, UserError):
        return _say(f"error{where}: {error}", error.exit_code)
    if isinstance(error, BrokenPipeError):
        return reader_gone()
    if isinstance(error, OSError):
        if error.filename is None and error.errno in FULL:  # files of ours have names
            return _no_more_output(str(unwritable("standard output", error)), USAGE)
        return _say(f"error: {error}; check the path, its permissions and free space", FAILED)
    raise error


@contextmanager
def about(*paths: Path) -> Iterator[None]:
    """What goes wrong inside is the fault of a run that is read, and ends in a line that names it.

    Raises:
        UserError: in place of every error that is not one for users already.
    """
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        raise UserError(
            f"{paths[0]}{more}: cannot be shown ({type(error).__name__}: {error}); a file in it is "
            "damaged, or another version wrote it"
        ) from error


def reader_gone() -> int:
    """After a BrokenPipeError: say so in one line; returns the exit code."""
    return _no_more_output("nobody reads the output any more; files are whole", FAILED)


def _no_more_output(why: str, code: int) -> int:
    with suppress(OSError):  # else the interpreter flushes into it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _say(f"error: {why}", code)


def _say(line: str, code: int) -> int:
    with suppress(OSError):  # stderr may be the same broken pipe
        show(line, file=sys.stderr)
    return code
