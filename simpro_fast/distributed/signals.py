"""Signals: an end at once before training, then requests to stop.

SIGTERM and SIGUSR1 (Slurm, Kubernetes, spot machines, `kill`) mean: finish the step, save, exit 75.
Imports take seconds, and an exception that a signal raises within one is swallowed, or leaves a
package half imported; there is nothing to save by then, so the process ends where it stands.
Nothing heavy may be imported here.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from threading import current_thread, main_thread
from types import FrameType
from typing import NoReturn

PREEMPTED = 75
"""Exit code EX_TEMPFAIL: stopped on request, the same command goes on."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


def end_on_signals() -> None:
    """From here on SIGTERM, SIGUSR1 and Ctrl-C end the process at once."""
    for number in not_ignored():
        signal.signal(number, _end_at_once)


@contextmanager
def interrupt_ends() -> Iterator[None]:
    """While a command that does not train imports packages, Ctrl-C ends it: one line, code 130."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler or current_thread() is not main_thread():
        yield  # Ctrl-C is ignored, or somebody else's
        return
    signal.signal(signal.SIGINT, _end_at_once)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    line, code = "interrupted before anything was done; start again", INTERRUPTED
    if number != signal.SIGINT:
        name, code = signal.Signals(number).name, PREEMPTED
        line = f"preempted ({name}) before training began: nothing to save; start again to go on"
    if os.environ.get("RANK", "0") == "0":
        # The handler may stand within a print of the same stream, which must not be entered twice.
        with suppress(OSError):
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, f"{line}\n".encode())
    os._exit(code)


def not_ignored() -> list[signal.Signals]:
    """The signals to handle: nohup and `&` ignore Ctrl-C."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [*STOP_SIGNALS, *([] if ignored else [signal.SIGINT])]


def usual(numbers: Iterable[int]) -> None:
    """Give signals the effect that they have in any Python process."""
    for number in numbers:
        interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)


class Preempted(Exception):
    """All ranks stop after the same step, because one was asked to.

    Args:
        saved_step: the step of the checkpoint that was saved on the way out, if one was.
    """

    def __init__(self, saved_step: int | None) -> None:
        super().__init__("preempted")
        self.saved_step = saved_step
