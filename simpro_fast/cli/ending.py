"""How a verb ends: one line and an exit code for everything that a user can cure."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path

from simpro_fast.errors import UserError
from simpro_fast.printable import show

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130

Body = Callable[[Sequence[str] | None], int]


def verb(body: Body) -> Body:
    """Let `body(arguments)` return its exit code and raise what users can cure.

    A `UserError`, an `OSError`, Ctrl-C and a reader that has gone (`... | head`) become one line on
    stderr and the exit code: 1, or 2 for usage (`ConfigError`), 130 for Ctrl-C.
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
            return _say(f"error: {error}; check the path, its permissions and free space", FAILED)
        except KeyboardInterrupt as error:  # a verb may say what it leaves behind
            return _say(str(error) or "interrupted; files are whole", INTERRUPTED)

    return main


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
    with suppress(OSError):  # else the interpreter flushes into it once more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return _say("error: nobody reads the output any more; files are whole", FAILED)


def _say(line: str, code: int) -> int:
    with suppress(OSError):  # stderr may be the same broken pipe
        show(line, file=sys.stderr)
    return code
