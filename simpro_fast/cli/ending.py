"""How a verb ends: one line and an exit code for everything that a user can cure."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps

from simpro_fast.errors import UserError
from simpro_fast.printable import show
from simpro_fast.utils.atomic_write import FULL, unwritable

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

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
        try:
            code = body(arguments)
            sys.stdout.flush()  # a pipe that has broken is noticed here, not at the exit
            return code
        except UserError as error:
            return _say(f"error: {error}", error.exit_code)
        except BrokenPipeError:
            return reader_gone()
        except OSError as error:
            if error.filename is None and error.errno in FULL:  # files of ours have names
                return _no_more_output(str(unwritable("standard output", error)), USAGE)
            return _say(f"error: {error}; check the path, its permissions and free space", FAILED)
        except KeyboardInterrupt as error:  # a verb may say what it leaves behind
            return _say(str(error) or "interrupted; files are whole", INTERRUPTED)

    return main


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
