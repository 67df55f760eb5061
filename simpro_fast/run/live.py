"""How a run stands, from its files alone; nothing is locked, so no start is ever in its way."""

from __future__ import annotations

import math
import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpro_fast.config import Config
from simpro_fast.config.saved import read_saved_config
from simpro_fast.data.splits.split import JSON_NAME as SPLIT
from simpro_fast.data.splits.split import SplitFile
from simpro_fast.distributed.failure_notes import Failure
from simpro_fast.distributed.heartbeat import Beat, read_beats
from simpro_fast.distributed.launchers import is_running
from simpro_fast.distributed.watchdog import BEATS, ENDED, NOTES
from simpro_fast.run.directory import RunDirectory
from simpro_fast.run.files import read_metrics
from simpro_fast.run.lock import lock_path
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.file_schema import read_as
from simpro_fast.utils.machine import host_name
from simpro_fast.utils.printable import printable, printables
from simpro_fast.utils.regular_file import read_text

RUNNING, STARTING = "running", "starting"
FINISHED, FAILED, PREEMPTED, INTERRUPTED = "finished", "failed", "preempted", "interrupted"
STALE = "stale"
SILENT_SECONDS = 60.0
"""Without a beat; then a rank of another machine counts as gone. Ranks beat every 10 s."""
_HOLDER = re.compile(r"process (\d+) on (\S+)")


@dataclass(frozen=True)
class RankLife:
    """Last state that a rank wrote."""

    beat: Beat
    age: float
    """Seconds since then, by the times of files."""
    alive: bool
    """Its process runs; of another machine: it has beaten within `SILENT_SECONDS`."""


@dataclass(frozen=True)
class LiveRun:
    """A run at one moment."""

    path: Path
    config: Config
    state: str
    """One of the constants above."""
    message: str
    """Why it ended before its time; else empty."""
    step: int
    rows: list[dict[str, Any]]
    """Rows of metrics.jsonl."""
    class_names: list[str]
    """Empty before the split is made."""
    unlabeled_counts: list[int] | None
    """Images per class; None where the truth is unknown."""
    ranks: list[RankLife]

    @property
    def has_ended(self) -> bool:
        return self.state not in (RUNNING, STARTING)

    def last(self, key: str) -> Any:
        """The newest value of a metric that is not null; None without any."""
        return next((row[key] for row in reversed(self.rows) if row.get(key) is not None), None)

    def seconds_left(self) -> float | None:
        """Until the last step at the speed of the last period, evaluations left out."""
        speed, config = self.last("images_per_second"), self.config
        if not speed or self.has_ended:
            return None
        views = config.labeled_views + config.data.mu * (1 + config.strong_views)
        left = config.train.steps - self.step
        seconds = float(left * config.data.batch_size * views / speed)
        return seconds if math.isfinite(seconds) else None


def read_live(run_dir: Path) -> LiveRun:
    """How the run in a directory stands now.

    Raises:
        UserError: it is none, or a file of it is damaged.
    """
    run = RunDirectory(run_dir)
    if not (run_dir / "config.yaml").is_file():
        what = "it has no config.yaml" if run_dir.is_dir() else "no such folder"
        raise UserError(f"{run_dir}: not a run directory ({what}); name one, <name>/seed<k>")
    config = read_saved_config(run_dir / "config.yaml")
    class_names, unlabeled_counts = list[str](), None
    if (run_dir / SPLIT).is_file():
        split = read_as(run_dir / SPLIT, SplitFile)
        class_names = printables(split.class_names) or []
        unlabeled_counts = split.unlabeled_counts
    classes = len(class_names) or None
    rows = read_metrics(run.metrics, classes) if run.metrics.is_file() else []
    ranks = _ranks(run_dir / BEATS)
    end = _end(run_dir)
    summary = run.read_summary()
    state, message = _state(run_dir, config, summary, ranks, end)
    steps = [row["step"] for row in rows[-1:]]
    if state in (RUNNING, STALE):
        steps += [one.beat.step for one in ranks]
    elif state in (FAILED, PREEMPTED, INTERRUPTED):
        steps += [end.step] if end is not None else []
    elif summary is not None and state == FINISHED:
        steps += [summary["steps"]]
    return LiveRun(
        path=run_dir,
        config=config,
        state=state,
        message=printable(message),
        step=max(steps, default=0),
        rows=rows,
        class_names=class_names,
        unlabeled_counts=unlabeled_counts,
        ranks=ranks,
    )


def _ranks(folder: Path) -> list[RankLife]:
    found, here = [], host_name()
    for beat, written in read_beats(folder):
        age = max(0.0, time.time() - written)
        alive = is_running(beat.pid) if beat.host == here else age < SILENT_SECONDS
        found.append(RankLife(beat, age, alive))
    return found


def _state(
    run_dir: Path,
    config: Config,
    summary: dict[str, Any] | None,
    ranks: list[RankLife],
    end: Failure | None,
) -> tuple[str, str]:
    if summary is not None and summary["steps"] >= config.train.steps:
        return FINISHED, ""
    if any(one.alive for one in ranks):
        gone = [str(one.beat.rank) for one in ranks if not one.alive]
        return RUNNING, f"rank(s) {', '.join(gone)} without a sign of life" if gone else ""
    if _holder_runs(run_dir):
        return STARTING, ""
    if end is not None:
        return (end.kind if end.kind in (PREEMPTED, INTERRUPTED) else FAILED), end.message
    cure = "start its command again, which goes on from the last checkpoint"
    if ranks:
        return STALE, f"its processes have ended without a word: killed? {cure}"
    return STALE, f"no process trains here; {cure}"


def _holder_runs(run_dir: Path) -> bool:
    """Whether the process that the lock file names, of this machine, still has that file open."""
    path = lock_path(run_dir)
    with suppress(OSError, ValueError):
        named = _HOLDER.match(read_text(path))
        if named is None or named[2] != host_name() or not is_running(int(named[1])):
            return False
        opened = Path(f"/proc/{named[1]}/fd")
        try:
            numbers = os.listdir(opened)
        except PermissionError:  # another user's
            return True
        for number in numbers:
            with suppress(OSError):
                if os.path.samefile(opened / number, path):
                    return True
    return False


def _end(run_dir: Path) -> Failure | None:
    """Read how the last start ended: rank 0, else a rank that failed before the others."""
    for path in (run_dir / ENDED, *sorted((run_dir / NOTES).glob("rank*.json"))):
        with suppress(UserError):
            if path.is_file():
                return read_as(path, Failure)
    return None
