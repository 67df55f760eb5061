"""Being asked to stop: by a signal, or by the death of the launcher.

SIGTERM and SIGUSR1 (Slurm, Kubernetes, spot machines, `kill`) mean: finish the step, save, exit 75.
A signal that reaches only the launcher reaches no rank: `deepspeed` dies of SIGTERM and leaves its
ranks behind, so every rank looks for the launchers above it and takes their death for a signal.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from simpro_fast.cli.entry import without_end_at_once

PREEMPTED = 75
"""Exit code EX_TEMPFAIL: stopped on request, the same command goes on."""
STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_LAUNCHER_SCRIPTS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_LAUNCHER_MODULES = ("deepspeed.launcher", "torch.distributed.run", "torch.distributed.launch")


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

    def install(self) -> None:
        """Handle the signals from here on. Main thread only."""
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


@dataclass(frozen=True)
class Process:
    """A process, told apart from a later one with the same number by its start time."""

    pid: int
    started: int

    def is_alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[1] == self.started


def launchers_above(pid: int) -> list[Process]:
    """The unbroken chain of launcher processes above `pid`, nearest first (Linux).

    `deepspeed` is two processes: the command and the one that starts the ranks of a machine.
    A shell, an ssh session or a container's first process is not a launcher: a run that `nohup`
    has detached outlives them.
    """
    chain: list[Process] = []
    own = _stat(pid)
    while own is not None:
        parent = own[0]
        own = _stat(parent)
        if own is None or not _is_launcher(_arguments(parent)):
            break
        chain.append(Process(parent, own[1]))
    return chain


def is_running(pid: int) -> bool:
    """Whether a process of this machine exists and has not ended."""
    return _stat(pid) is not None


def _stat(pid: int) -> tuple[int, int] | None:
    """(parent, start time in clock ticks) of a process that runs; None for one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in "ZX" else (int(fields[1]), int(fields[19]))


def _arguments(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/cmdline").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.split("\0")


def _is_launcher(arguments: list[str]) -> bool:
    """`python .../bin/deepspeed ...`, `python -u -m deepspeed.launcher.launch ...` and the like."""
    rest = [a for a in arguments[1:] if a != "-u"]
    if len(rest) > 1 and rest[0] == "-m":
        return rest[1].startswith(_LAUNCHER_MODULES)
    return bool(rest) and Path(rest[0]).name in _LAUNCHER_SCRIPTS
