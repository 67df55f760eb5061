"""Being asked to stop by a signal.

SIGTERM and SIGUSR1 (Slurm, Kubernetes, spot machines, `kill`) mean: finish the step, save, exit 75.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from simpro_fast.distributed.early_signals import without_end_at_once

PREEMPTED = 75
"""Exit code EX_TEMPFAIL: stopped on request, the same command goes on."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


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

    Until `defer` there is nothing to save, and the handler raises `Preempted` where it stands.
    Python runs handlers on the main thread between two of its instructions, which is too late
    while that thread hangs in a collective; `arrived` tells another thread at once.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        self.interrupted = False
        self._deferred = False
        self._before: dict[int, Any] = {}
        self.bell: socket.socket | None = None
        """Readable as soon as a signal has arrived."""
        self._bell_pull: socket.socket | None = None
        self._wakeup_before = -1

    @property
    def requested(self) -> bool:
        return self.reason is not None

    @property
    def deferred(self) -> bool:
        """Training has begun, and looks at `requested` itself."""
        return self._deferred

    def install(self) -> None:
        """Handle the signals from here on.

        On another thread than the main one nothing is handled: signals are then the affair of the
        program that trains there.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        _installed.add(self)
        receiver, sender = socket.socketpair()
        receiver.setblocking(False)
        sender.setblocking(False)
        self.bell, self._bell_pull = receiver, sender
        self._wakeup_before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        for number in STOP_SIGNALS:
            self._handle(number, self._on_stop)
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # nohup and `&` ignore Ctrl-C
            self._handle(signal.SIGINT, self._on_interrupt)

    def forget(self) -> None:
        """In a forked child: signals have their usual effect there, and are not the parent's."""
        signal.set_wakeup_fd(-1)
        for number in self._before:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)

    def defer(self) -> None:
        """From now on training looks at `requested` itself."""
        self._deferred = True

    def ignore(self) -> None:
        """The end has begun: launchers repeat their signals, and nothing may interrupt it."""
        for number in self._before:
            signal.signal(number, signal.SIG_IGN)

    def remove(self) -> None:
        """Put everything back as `install` found it, or as usual where the start handled it."""
        _installed.discard(self)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
        if self.bell is not None and self._bell_pull is not None:
            signal.set_wakeup_fd(self._wakeup_before)
            self.bell.close()
            self._bell_pull.close()
            self.bell = self._bell_pull = None

    def arrived(self) -> set[int]:
        """Numbers of the signals since the last call, also those no handler has run for yet."""
        if self.bell is None:
            return set()
        try:
            return set(self.bell.recv(4096))
        except BlockingIOError:
            return set()

    def _handle(self, number: int, handler: Callable[[int, FrameType | None], None]) -> None:
        self._before[number] = without_end_at_once(number, signal.signal(number, handler))

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        self.reason = self.reason or signal.Signals(number).name
        if not self._deferred:
            raise Preempted(None, agreed=False)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        raise KeyboardInterrupt


_installed: set[StopRequests] = set()


def _forget_in_child() -> None:
    for requests in _installed:
        requests.forget()


os.register_at_fork(after_in_child=_forget_in_child)
