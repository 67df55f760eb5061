"""From the exception that ends a run on this rank to one line and an exit code."""

from __future__ import annotations

import traceback

from simpro_fast.distributed.failure_notes import (
    NOTE_DELAY,
    Failure,
    is_lost_connection,
    is_mine_to_tell,
    line_about,
    say,
)
from simpro_fast.distributed.signals import INTERRUPTED, PREEMPTED, Preempted
from simpro_fast.distributed.watchdog import (
    ENDING_SECONDS,
    LAUNCHER_GONE,
    Watchdog,
)
from simpro_fast.utils.errors import ConfigError, PeerError, UserError


def conclude(error: BaseException, watchdog: Watchdog) -> int:
    """Tell the user and the other ranks why this rank ends, and see to it that it does.

    Call it before the process group is left: peers look for the note when their connection breaks.

    Returns:
        the exit code.
    """
    watchdog.requests.ignore()
    ranks = watchdog.ranks
    failure, news = _explain(error, watchdog)
    watchdog.told = True
    watchdog.end_within(ENDING_SECONDS, failure)
    if news and watchdog.notes is not None:
        watchdog.notes.leave(failure)
    watchdog.leave_end(failure)
    # What all ranks find out for themselves, such as a wrong key, one of them tells.
    told = ranks.is_main if isinstance(error, ConfigError) else is_mine_to_tell(failure, ranks)
    if told:
        if news and failure.kind == "error" and not isinstance(error, UserError | OSError):
            for line in "".join(traceback.format_exception(error)).splitlines():
                say(line)
        say(line_about(failure, ranks))
    return failure.exit_code


def _explain(error: BaseException, watchdog: Watchdog) -> tuple[Failure, bool]:
    """What is behind `error`, here or on another rank, and whether the others need a note of it."""
    requests = watchdog.requests
    if isinstance(error, KeyboardInterrupt) or requests.interrupted:
        message = "interrupted; start again to resume from the last checkpoint"
        return watchdog.failure("interrupted", message, INTERRUPTED), True
    if isinstance(error, Preempted):
        step = error.saved_step
        saved = "nothing was saved" if step is None else f"checkpoint of step {step} is saved"
        # Another rank may have noticed first, and asked for the stop before this one looked.
        gone = LAUNCHER_GONE if watchdog.launcher_is_gone() else "a signal to another rank"
        reason = requests.reason or gone
        message = f"preempted ({reason}): {saved}; start again to go on"
        own = watchdog.failure("preempted", message, PREEMPTED)
        peer = None if error.agreed else _peer(watchdog, 0.0)
        return peer or own, peer is None and not error.agreed
    if isinstance(error, PeerError) or is_lost_connection(error):
        peer = _peer(watchdog, NOTE_DELAY)
        code = error.exit_code if isinstance(error, PeerError) else 1
        return peer or watchdog.failure("error", _lost(error, watchdog), code), False
    if isinstance(error, UserError):
        return watchdog.failure("error", str(error), error.exit_code), True
    if isinstance(error, OSError):
        message = f"{error}; check the path, its permissions and free space"
        return watchdog.failure("error", message, 1), True
    text = str(error).strip().splitlines()
    message = f"{type(error).__name__}: {text[0] if text else ''}"
    return watchdog.failure("error", message, 1), True


def _peer(watchdog: Watchdog, wait: float) -> Failure | None:
    return watchdog.notes.first(wait) if watchdog.notes is not None else None


def _lost(error: BaseException, watchdog: Watchdog) -> str:
    """What can be said without a note: the peer was killed, or its machine is gone."""
    if isinstance(error, PeerError):
        return str(error)
    gone = watchdog.heartbeats.gone() if watchdog.heartbeats is not None else []
    if gone:
        beat = gone[0]
        step = max(beat.step, watchdog.step)  # all ranks synchronise in every step
        return (
            f"rank {beat.rank} on {beat.host} has gone after step {step} without a message: "
            "killed, perhaps for want of memory; look at its output and at the system's log"
        )
    reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return f"lost the connection to another rank; look at its output ({reason})"
