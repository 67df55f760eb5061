"""Training the members of a sweep one after another, each in a process of its own.

What happens to one, be it killed by the system for want of memory, does not touch the others. A
request to stop reaches the member that trains, which saves as any run does, and ends the sweep; the
same command goes on with it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from simpro_fast.cli.ending import DONE, FAILED
from simpro_fast.cli.sweep import Member
from simpro_fast.distributed.environment import world_size_from_environment
from simpro_fast.distributed.signals import INTERRUPTED, PREEMPTED, usual
from simpro_fast.training.resume import finished_summary
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.printable import show

ENDING_SECONDS = 60.0
"""For all processes of a member to end after it was asked to."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
# What a launcher has set for the sweep itself, which is one process, is not for its members.
_RANK_VARIABLES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "CROSS_RANK", "CROSS_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "GROUP_WORLD_SIZE"),
}


def unfinished(members: Sequence[Member]) -> list[Member]:
    """Those that are still to be trained.

    Raises:
        ConfigError: what is finished under a member's name is another configuration, or the sweep
            is one of several ranks.
    """
    if world_size_from_environment() > 1:
        raise ConfigError(
            "a sweep starts its runs itself: start it once, and give it the launcher: "
            "simpro-fast train ... --launcher 'deepspeed --num_gpus 8 launch/train.py'"
        )
    return [member for member in members if finished_summary(member.config) is None]


def print_commands(members: Sequence[Member], launcher: Sequence[str]) -> int:
    """One line of shell for each member that is not finished; returns the exit code 0."""
    left = unfinished(members)
    for member in left:
        print(shlex.join(member.command(launcher)), flush=True)
    show(
        f"{len(left)} of {len(members)} runs to train, {len(members) - len(left)} finished",
        sys.stderr,
    )
    return DONE


def train_members(members: Sequence[Member], launcher: Sequence[str]) -> int:
    """Train what is not finished, one after another.

    Returns:
        the exit code: 0 all are finished, 1 some failed (listed), 75 or 130 asked to stop.

    Raises:
        ConfigError: as `unfinished`; nothing was trained.
    """
    left, failed = unfinished(members), list[str]()
    show(f"sweep of {len(members)} runs, {len(members) - len(left)} finished before")
    with _Signals() as signals:
        for number, member in enumerate(left, start=1):
            show(f"== run {number} of {len(left)}: {member}")
            code = _run(member.command(launcher), signals)
            if signals.exit_code or code in (PREEMPTED, INTERRUPTED):
                show(f"sweep stopped at {member}; the same command goes on from there", sys.stderr)
                return signals.exit_code or code
            if code:
                why = f"signal {-code}" if code < 0 else f"exit code {code}"
                failed.append(f"{member} ({why})")
                show(f"{failed[-1]}: failed, the sweep goes on", sys.stderr)
    show(f"sweep ended: {len(members) - len(failed)} of {len(members)} runs are finished")
    if failed:
        show(f"error: {len(failed)} of {len(members)} runs failed:", sys.stderr)
        for one in failed:
            show(f"  {one}", sys.stderr)
    return FAILED if failed else DONE


def _run(command: Sequence[str], signals: _Signals) -> int:
    """Start a member and wait for it; returns its exit code, negative for a signal."""
    if signals.exit_code:
        return signals.exit_code
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _RANK_VARIABLES and not name.startswith(("TORCHELASTIC_", "ROLE_"))
    }
    try:
        # A session of its own: Ctrl-C reaches it once, through us, with all its processes.
        process = subprocess.Popen(command, env=kept, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"{command[0]}: cannot be started ({error.strerror})") from None
    signals.watch(process.pid)
    code = process.wait()
    if signals.exit_code:
        _wait_for_group(process.pid)
    signals.watch(None)
    return code


def _wait_for_group(group: int) -> None:
    """A launcher may die of the signal while its ranks still save."""
    deadline = time.monotonic() + ENDING_SECONDS
    with suppress(OSError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)


class _Signals:
    """Passes requests to stop on to the member that trains."""

    def __init__(self) -> None:
        self.exit_code = 0
        """Of the sweep, once it was asked to stop."""
        self._number = 0
        self._group: int | None = None

    def __enter__(self) -> _Signals:
        # nohup and `&` ignore some
        self._handled = [n for n in _SIGNALS if signal.getsignal(n) is not signal.SIG_IGN]
        for number in self._handled:
            signal.signal(number, self._stop)
        return self

    def __exit__(self, *error: object) -> None:
        usual(self._handled)

    def watch(self, group: int | None) -> None:
        """From now on signals are for this group of processes; also one that came just before."""
        self._group = group
        if self._number:
            self._pass_on(self._number)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.exit_code = INTERRUPTED if number == signal.SIGINT else PREEMPTED
        self._number = signal.SIGTERM if number == signal.SIGHUP else number
        self._pass_on(self._number)

    def _pass_on(self, number: int) -> None:
        if self._group is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._group, number)
