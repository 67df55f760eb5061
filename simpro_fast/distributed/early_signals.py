"""Signals before training begins.

Imports take seconds, and an exception that a signal raises within one is swallowed, or leaves a
package half imported. Until the watchdog takes over there is nothing to save, so a signal ends the
process where it stands. Nothing heavy may be imported here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn


def end_on_signals() -> None:
    """From here on SIGTERM, SIGUSR1 and Ctrl-C end the process at once."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, end_at_once)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup and `&` ignore Ctrl-C
        signal.signal(signal.SIGINT, end_at_once)


@contextmanager
def interrupt_ends() -> Iterator[None]:
    """While a command that does not train imports packages, Ctrl-C ends it: one line, code 130."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        _say("interrupted before anything was done; start again")
        os._exit(130)

    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or current_thread() is not main_thread():
        yield  # Ctrl-C is ignored, or somebody else's
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """Signal handler until training begins: one line, from rank 0, and the exit code."""
    line, code = _line_of(number)
    _say(line)
    os._exit(code)


def _line_of(number: int) -> tuple[str, int]:
    if number == signal.SIGINT:
        return "interrupted before training began; start again", 130
    name = signal.Signals(number).name
    return f"preempted ({name}) before training began: nothing to save; start again to go on", 75


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        # The handler may stand within a print of the same stream, which must not be entered twice.
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())


def without_end_at_once(number: int, handler: Any) -> Any:
    """What to put back for `handler` once training has begun: never `end_at_once`."""
    if handler is not end_at_once:
        return handler
    return signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
