"""One thread per rank that bounds how long the end of a run may take.

It notices signals while the main thread hangs in a collective, the death of the launcher, a peer's
note that it has failed, and the lack of progress. It asks the main thread to stop where that can
work, and ends the process where it does not. Checkpoints are whole or absent, so an end at any
moment loses no more than the steps since the last one.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

from simpro_fast.config import Config
from simpro_fast.distributed.failure_notes import (
    Failure,
    FailureNotes,
    is_mine_to_tell,
    line_about,
    say,
)
from simpro_fast.distributed.heartbeat import (
    Heartbeats,
    collectives_entered,
    line_of_thread,
    stalled_ranks,
)
from simpro_fast.distributed.launchers import launchers_above
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.distributed.signals import INTERRUPTED, PREEMPTED, STOP_SIGNALS, StopRequests
from simpro_fast.utils.atomic_write import write_json
from simpro_fast.utils.errors import UserError

logger = logging.getLogger(__name__)

ENDING_SECONDS = 10.0
"""For the main thread to leave by itself once the run has failed somewhere."""
INTERRUPTED_SECONDS = 5.0
"""Likewise after Ctrl-C, when somebody is waiting."""
TICK = 0.5
"""Seconds between two looks at what costs nothing: signals, launchers, this rank's own progress."""
SUSPENDED = 5.0
"""Seconds without a tick after which the whole process must have been suspended."""
FOLDERS = NOTES, BEATS = ("failures", "heartbeats")
"""What the ranks write for each other, in the run directory."""
ENDED = "ended.json"
"""In the run directory: why the last start ended before its time."""
TRAINING = "training"
LAUNCHER_GONE = "the launcher is gone"


class Watchdog:
    """Signals, heartbeats and deadlines of one rank.

    Until `start` it only keeps the step and the phase, which is all that benches need.

    Args:
        config: `distributed.stall_timeout` and `distributed.preempt_grace` are used.
        ranks: this process among all.
        write: False leaves neither heartbeats nor notes, as in dry runs.
    """

    def __init__(self, config: Config, ranks: Ranks, *, write: bool = False) -> None:
        self.ranks = ranks
        self.requests = StopRequests()
        self.notes: FailureNotes | None = None
        self.heartbeats: Heartbeats | None = None
        self.step, self._phase = 0, "set-up"
        self._stall_timeout = config.distributed.stall_timeout
        self._grace = config.distributed.preempt_grace
        self._interval = min(max(self._stall_timeout / 20, 0.1), 10.0)
        self._run_dir = config.run_dir if write else None
        self._launchers = launchers_above(os.getpid())
        self._stop_sent = False
        self.told = False
        """The main thread has said why the run ends."""
        self._deadline: tuple[float, Failure] | None = None
        self._thread: threading.Thread | None = None
        self._trainer = threading.main_thread()
        self._finished = threading.Event()

    def start(self) -> None:
        """Handle signals and watch. All ranks call it together, on the thread that trains."""
        self._trainer = threading.current_thread()
        if self._run_dir is not None and self.ranks.world_size > 1:
            if self.ranks.is_main:
                for name in FOLDERS:  # of an earlier start
                    shutil.rmtree(self._run_dir / name, ignore_errors=True)
            self.notes = FailureNotes(self._run_dir / NOTES, self.ranks)
        self.requests.install()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop watching; harmless when repeated."""
        self._finished.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.requests.remove()
        if self.heartbeats is not None:
            self.heartbeats.remove()

    def begin(self, step: int) -> None:
        """Training starts: requests wait for the end of a step, and the first one may be slow."""
        self.step, self._phase = step, "first step"
        self.requests.deferred = True
        if self._run_dir is not None and self._thread is not None:
            ranks = self.ranks
            if ranks.is_main:
                with suppress(OSError):
                    (self._run_dir / ENDED).unlink(missing_ok=True)
            self.heartbeats = Heartbeats(self._run_dir / BEATS, ranks.rank, ranks.world_size)
            self.heartbeats.beat(step, self._phase)

    def step_done(self, step: int) -> None:
        """The steps from now on are limited by `distributed.stall_timeout`."""
        self.step, self._phase = step, TRAINING

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Work that may take longer than a step: evaluation, saving, the end of the run."""
        before, self._phase = self._phase, name
        try:
            yield
        finally:
            self._phase = before

    def failure(self, kind: str, message: str, exit_code: int) -> Failure:
        """What this rank says of itself, at its present step."""
        return Failure.of(self.ranks.rank, self.step, kind, message, exit_code)

    def leave_end(self, failure: Failure) -> None:
        """Write why a run ends that had begun to train, for whoever looks at its files."""
        if self.heartbeats is not None and self.ranks.is_main and self._run_dir is not None:
            with suppress(OSError, UserError):  # a disk that refuses it
                write_json(self._run_dir / ENDED, failure.model_dump())

    def end_within(self, seconds: float, failure: Failure) -> None:
        """End the process unless it has ended by then; the earliest such call counts."""
        deadline = time.monotonic() + seconds
        if self._deadline is None or deadline < self._deadline[0]:
            self._deadline = (deadline, failure)

    def _watch(self) -> None:
        marker, ticked = self._progress(), time.monotonic()
        since = next_look = ticked
        while not self._finished.is_set():
            pause = min(self._interval, TICK)
            if self.requests.bell is not None:
                select.select([self.requests.bell], [], [], pause)
            else:
                self._finished.wait(pause)
            now = time.monotonic()
            if now - ticked > SUSPENDED:
                since = now
            ticked = now
            self._look_for_requests()
            if now >= next_look:  # at files, which thousands of ranks may share
                next_look = now + self._interval
                self._look_for_failed_peer()
                if self.heartbeats is not None:
                    self.heartbeats.beat(self.step, self._phase)
            if self._deadline is not None and now >= self._deadline[0]:
                self._end(self._deadline[1])
            current = self._progress()
            if current != marker:
                marker, since = current, now
            elif self._phase == TRAINING and now - since > self._stall_timeout:
                self._report_stall(current)
                since = ticked = time.monotonic()

    def launcher_is_gone(self) -> bool:
        """Whether a launcher that stood above this process has ended."""
        return not all(launcher.is_alive() for launcher in self._launchers)

    def _progress(self) -> tuple[str, int, int]:
        return self._phase, self.step, collectives_entered()

    def _look_for_requests(self) -> None:
        arrived = self.requests.arrived()
        if not self._stop_sent and self.launcher_is_gone():
            self._stop_sent = True
            self.requests.reason = self.requests.reason or LAUNCHER_GONE
            if self.requests.bell is not None:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        if signal.SIGINT in arrived:
            line = "interrupted; start again to resume from the last checkpoint"
            self.end_within(INTERRUPTED_SECONDS, self.failure("interrupted", line, INTERRUPTED))
        if self.requests.reason or not arrived.isdisjoint(STOP_SIGNALS):
            grace, line = self._grace, "preempted before training began; start again to go on"
            if self.requests.deferred:
                line = (
                    f"preempted, but not at the end of a step within {grace:g} s "
                    "(distributed.preempt_grace); start again to resume from the last checkpoint"
                )
            else:  # nothing to save
                grace = min(grace, ENDING_SECONDS)
            self.end_within(grace, self.failure("preempted", line, PREEMPTED))

    def _look_for_failed_peer(self) -> None:
        failure = self.notes.first() if self.notes is not None else None
        if failure is not None:
            self.end_within(ENDING_SECONDS, failure)

    def _report_stall(self, progress: tuple[str, int, int]) -> None:
        """Find out who is behind and end the run; a rank alone only warns."""
        self._look_for_failed_peer()
        if self._deadline is not None:
            return  # the end has begun, and why is known
        where = line_of_thread(self._trainer)
        limit = f"no progress for {self._stall_timeout:g} s (distributed.stall_timeout)"
        if self.heartbeats is None or self.ranks.world_size == 1:
            logger.warning("%s after step %d, in %s", limit, self.step, where)
            return
        earlier = self.heartbeats.read()
        for _ in range(4):  # the others notice it within one of their intervals
            self.heartbeats.beat(self.step, self._phase, where)
            time.sleep(self._interval)
        if self._progress() != progress:
            return
        later = self.heartbeats.read()
        failure = self.failure("stalled", limit, 1)
        behind = stalled_ranks(earlier, later, self.ranks.world_size)
        if not behind:
            why = "all ranks wait in one collective; check the network and the devices"
            self._end(failure.model_copy(update={"message": f"{limit}: {why}"}))
        first = behind[0]
        changes: dict[str, Any] = {"rank": first, "silent": tuple(behind)}
        if first in later:
            beat = later[first]
            why = f"in {beat.where}" if beat.where else "its process does not run"
            # All ranks synchronise in every step, so a beat that says less than ours is an old one.
            changes |= {"host": beat.host, "step": max(beat.step, self.step)}
        else:
            why = "it gave no sign of life"
        others = f"; rank(s) {', '.join(map(str, behind[1:]))} likewise" if behind[1:] else ""
        changes["message"] = f"{limit}: {why}{others}"
        self._end(failure.model_copy(update=changes))

    def _end(self, failure: Failure) -> NoReturn:
        if self.notes is not None:
            self.notes.leave(failure)
        if not self.told and is_mine_to_tell(failure, self.ranks):
            say(line_about(failure, self.ranks))
        self.leave_end(failure)
        os._exit(failure.exit_code)
