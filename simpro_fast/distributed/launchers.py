"""The launchers above this process, whose death means stop.

A signal that reaches only the launcher reaches no rank: `deepspeed` dies of SIGTERM and leaves its
ranks behind, so every rank looks for the launchers above it and takes their death for a signal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_LAUNCHER_SCRIPTS = {"deepspeed", "deepspeed.pt", "ds", "torchrun"}
_LAUNCHER_MODULES = ("deepspeed.launcher", "torch.distributed.run", "torch.distributed.launch")
_SWEEPS = {"train.py", "simpro-fast"}
_SWEEP_FLAGS = {"--grid", "--seeds", "--launcher"}


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
    """`python .../bin/deepspeed ...`, `python -u -m deepspeed.launcher.launch ...`, a sweep."""
    rest = [a for a in arguments[1:] if a != "-u"]
    if any(a.partition("=")[0] in _SWEEP_FLAGS for a in rest):
        return Path(rest[0]).name in _SWEEPS or rest[:2] == ["-m", "simpro_fast"]
    if len(rest) > 1 and rest[0] == "-m":
        return rest[1].startswith(_LAUNCHER_MODULES)
    return bool(rest) and Path(rest[0]).name in _LAUNCHER_SCRIPTS
