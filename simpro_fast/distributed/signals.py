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
    for number in _not_ignored():
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


def _not_ignored() -> list[signal.Signals]:
    """The signals to handle: nohup and `&` ignore Ctrl-C."""
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    return [*STOP_SIGNALS, *([] if ignored else [signal.SIGINT])]


def usual(numbers: Iterable[int]) -> None:
    """Give signals the effect that they have in any Python process."""
    for number in numbers:
        interrupt = number == signal.SIGINT
        signal.signal(number, signal.default_int_handler if interrupt else signal.SIG_DFL)


class Preempted(Exception):
    """The run stops because it was asked to.

    Args:
        saved_step: the step of the checkpoint that was saved on the way out, if one was.
        agreed: all ranks stop at this same step; otherwise it is this rank's own decision.
    """

    def __init__(self, saved_step: int | None, *, agreed: bool) -> None:
        super().__init__("preempted")
        self.saved_step, self.agreed = saved_step, agreed


class StopRequests:
    """Turns signals into a flag that is read once a step.

    Until `deferred` there is nothing to save, and the handler raises `Preempted` where it stands.
    Python runs handlers on the main thread between two of its instructions, which is too late
    while that thread hangs in a collective; `arrived` tells another thread at once.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why to stop; None: nobody has asked for it."""
        self.interrupted = False
        self.deferred = False
        """Training has begun, and looks at `reason` itself."""
        self._handled: list[signal.Signals] = []
        self.bell: int | None = None
        """Descriptor that is readable as soon as a signal has arrived."""
        self._pull = -1

    def install(self) -> None:
        """Handle the signals from here on.

        On another thread than the main one nothing is handled: signals are then the affair of the
        program that trains there.
        """
        if current_thread() is not main_thread():
            return
        _installed.add(self)
        self.bell, self._pull = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._pull, warn_on_full_buffer=False)
        self._handled = _not_ignored()
        for number in self._handled:
            signal.signal(number, self._on_signal)

    def forget(self) -> None:
        """Give the signals their usual effect; also in a forked child, whose they are not."""
        signal.set_wakeup_fd(-1)
        usual(self._handled)

    def ignore(self) -> None:
        """The end has begun: launchers repeat their signals, and nothing may interrupt it."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    def remove(self) -> None:
        """Undo `install`; harmless when repeated."""
        if self.bell is not None:
            _installed.discard(self)
            self.forget()
            os.close(self.bell)
            os.close(self._pull)
            self.bell = None

    def arrived(self) -> set[int]:
        """Numbers of the signals since the last call, also those no handler has run for yet."""
        with suppress(BlockingIOError):
            return set(os.read(self.bell, 4096)) if self.bell is not None else set()
        return set()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self.interrupted = True
            raise KeyboardInterrupt
        self.reason = self.reason or signal.Signals(number).name
        if not self.deferred:
            raise Preempted(None, agreed=False)


_installed: set[StopRequests] = set()


def _forget_in_child() -> None:
    for requests in _installed:
        requests.forget()


os.register_at_fork(after_in_child=_forget_in_child)
