"""Why a run that trains is to stop: a signal, or the death of the launcher above it.

A signal that reaches only the launcher reaches no rank: `deepspeed` dies of SIGTERM and leaves its
ranks behind, so every rank looks for the launchers above it and takes their death for a signal.
"""

from __future__ import annotations

import os
import signal
import time
from itertools import takewhile
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType

import psutil

from simpro_fast.distributed.signals import not_ignored, usual

LAUNCHER_GONE = "the launcher is gone"
_LOOK_SECONDS = 1.0
_LAUNCHER_SCRIPTS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_LAUNCHER_MODULES = ("deepspeed.launcher", "torch.distributed.run", "torch.distributed.launch")
_SWEEPS = {"train.py", "simpro-fast"}
_SWEEP_FLAGS = {"--grid", "--seeds", "--launcher"}


class StopRequests:
    """Turns signals into a flag that is read once a step; Ctrl-C interrupts where it arrives."""

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why to stop; None: nobody has asked for it."""
        self.interrupted = False
        self._handled: list[signal.Signals] = []
        self._launchers: list[psutil.Process] = []
        self._looked, self._process = 0.0, os.getpid()

    def install(self) -> None:
        """Handle the signals from here on, and watch the launchers.

        On another thread than the main one nothing is handled: signals are then the affair of the
        program that trains there.
        """
        if current_thread() is main_thread():
            self._launchers, self._handled = launchers_above(), not_ignored()
            for number in self._handled:
                signal.signal(number, self._on_signal)

    def ignore(self) -> None:
        """The end has begun: launchers repeat their signals, and nothing may interrupt it."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    def remove(self) -> None:
        """Undo `install`; harmless when repeated."""
        usual(self._handled)
        self._handled = []

    def asked(self) -> bool:
        """Whether to stop."""
        if self.reason is None and time.monotonic() - self._looked > _LOOK_SECONDS:
            self._looked = time.monotonic()
            self.reason = None if all(map(runs, self._launchers)) else LAUNCHER_GONE
        return self.reason is not None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:  # a forked child, such as a worker that is told to end
            usual(self._handled)
            os.kill(os.getpid(), number)
        elif number == signal.SIGINT:
            self.interrupted = True
            raise KeyboardInterrupt
        else:
            self.reason = self.reason or signal.Signals(number).name


def launchers_above() -> list[psutil.Process]:
    """The unbroken chain of launcher processes above this one, nearest first.

    `deepspeed` is two processes: the command and the one that starts the ranks of a machine.
    A shell, an ssh session or a container's first process is not a launcher: a run that `nohup`
    has detached outlives them.
    """

    def launches(process: psutil.Process) -> bool:
        try:
            return is_launcher(process.cmdline())
        except psutil.Error:
            return False

    return list(takewhile(launches, psutil.Process().parents()))


def runs(process: psutil.Process) -> bool:
    """Whether it has not ended; another process may have its number by now."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_launcher(arguments: list[str]) -> bool:
    """`python .../bin/deepspeed ...`, `python -u -m deepspeed.launcher.launch ...`, a sweep."""
    rest = [a for a in arguments[1:] if a != "-u"]
    if any(a.partition("=")[0] in _SWEEP_FLAGS for a in rest):
        return Path(rest[0]).name in _SWEEPS or rest[:2] == ["-m", "simpro_fast"]
    if len(rest) > 1 and rest[0] == "-m":
        return rest[1].startswith(_LAUNCHER_MODULES)
    return bool(rest) and Path(rest[0]).name in _LAUNCHER_SCRIPTS
