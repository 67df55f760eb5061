"""Signals before training begins.

Imports take seconds, and an exception that a signal raises within one is swallowed, or leaves a
package half imported. Until the watchdog takes over there is nothing to save, so a signal ends the
process where it stands. Nothing heavy may be imported here.

Python runs a handler between two of its instructions, so never within a C call that does not
return, such as a library that asks for memory again and again while it is loaded. A thread would
not run either, since such a call keeps Python's lock. So a small process stands by, to which the
signal is written at once, and ends this one if it has not ended by itself.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import Any, NoReturn

GRACE = 10.0
"""Seconds after a signal in which the process must have ended."""
_DONE = b"\0"
_guard: tuple[int, int] | None = None
"""Process that stands by, and the end of the pipe to it."""


def end_on_signals() -> None:
    """From here on SIGTERM, SIGUSR1 and Ctrl-C end the process at once, or within `GRACE`."""
    with suppress(OSError):  # no process, no memory: the handlers alone must do
        _post_guard(GRACE)
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


def dismiss_guard() -> None:
    """The watchdog takes over. Harmless when nothing stands by."""
    global _guard
    if _guard is None:
        return
    (process, pipe), _guard = _guard, None
    signal.set_wakeup_fd(-1)
    with suppress(OSError):
        os.write(pipe, _DONE)
        os.waitpid(process, 0)
    os.close(pipe)


def _post_guard(grace: float) -> None:
    global _guard
    guarded = os.getpid()
    receiver, sender = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(sender)
        _stand_by(guarded, receiver, grace)
    os.close(receiver)
    os.set_blocking(sender, False)
    signal.set_wakeup_fd(sender, warn_on_full_buffer=False)
    _guard = process, sender


def _stand_by(guarded: int, pipe: int, grace: float) -> NoReturn:
    """The small process: wait for a signal's number, then give `guarded` its time to end."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they reach the whole group
    deadline, arrived = float("inf"), 0
    while os.getppid() == guarded and time.monotonic() < deadline:
        if select.select([pipe], [], [], min(1.0, grace))[0]:
            content = os.read(pipe, 64)
            if not content or _DONE in content:
                os._exit(0)
            if not arrived:
                deadline, arrived = time.monotonic() + grace, content[0]
    if os.getppid() == guarded:
        _say(f"{_line_of(arrived)[0]} (killed: a library did not return within {grace:g} s)")
        os.kill(guarded, signal.SIGKILL)
    os._exit(0)


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
