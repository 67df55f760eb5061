"""The end of a run on this rank: one line for the user, an exit code, a word to the other ranks.

A rank that fails closes its connections, and all that its peers see is a traceback about a lost
socket. So it leaves a note in the store of the process group first, which they read then.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from simpro_fast.distributed.consistency import wait_for_all
from simpro_fast.distributed.process_group import Ranks, stop_ranks
from simpro_fast.distributed.signals import INTERRUPTED, PREEMPTED, Preempted
from simpro_fast.distributed.stop_requests import StopRequests
from simpro_fast.utils.errors import ConfigError, PeerError, UserError
from simpro_fast.utils.machine import host_name
from simpro_fast.utils.printable import show

ENDING_SECONDS = 10.0
"""For a rank of several to leave by itself once it has failed: a broken network may hold it."""
NOTE_SECONDS = 3.0
"""For a note to be left by a rank whose connection broke, or read by those that look for it."""
_LOST = (
    *("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed"),
    *("/gloo/", "NCCL error", "ncclRemoteError", "ncclSystemError", "remote process exited"),
)
_INTERRUPTED = "interrupted; start again to resume from the last checkpoint"


def conclude(error: BaseException, ranks: Ranks, requests: StopRequests) -> int:
    """Say why this rank ends, leave the process group, and end the process soon if it hangs.

    Returns:
        the exit code.
    """
    requests.ignore()
    if isinstance(error, KeyboardInterrupt) or requests.interrupted:
        code, line, first = INTERRUPTED, _INTERRUPTED, True
    elif isinstance(error, Preempted):
        step = error.saved_step
        saved = "nothing was saved" if step is None else f"checkpoint of step {step} is saved"
        reason = requests.reason or "a signal to another rank"
        code, line, first = PREEMPTED, f"preempted ({reason}): {saved}; start again to go on", False
    else:
        code, line = getattr(error, "exit_code", 1), _line(error)
        first = not (isinstance(error, PeerError) or is_lost_connection(error))
    peer = None
    if ranks.world_size > 1:
        timer = threading.Timer(ENDING_SECONDS, os._exit, [code])
        timer.daemon = True
        timer.start()
        if first:
            _tell(ranks, code, line)
        elif is_lost_connection(error):
            peer = _ask(ranks)
    if peer is not None:
        code, line = peer["code"], peer["line"]
    where = f" [rank {ranks.rank}]" if ranks.world_size > 1 else ""
    if code in (INTERRUPTED, PREEMPTED):
        mine = ranks.is_main
    elif peer is not None:
        mine = ranks.local_rank == 0  # one line per machine, beside the failing rank's own
        line = f"error{where}: rank {peer['rank']} on {peer['host']} failed first: {line}"
    else:  # what all ranks find out for themselves, one of them tells
        mine = ranks.is_main or not isinstance(error, ConfigError | PeerError)
        line = f"error{where}: {line}"
        if first and not isinstance(error, UserError | OSError):
            for part in "".join(traceback.format_exception(error)).splitlines():
                _say(part)
    if mine:
        _say(line)
    _leave(ranks)
    return code


def is_lost_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank, or the network, is gone."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _LOST)


def _line(error: BaseException) -> str:
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, OSError):
        return f"{error}; check the path, its permissions and free space"
    text = " ".join(str(error).split())[:300]
    if is_lost_connection(error):
        return f"another rank is gone or hangs; look at its output and the launcher's ({text})"
    return f"{type(error).__name__}: {text}"


def _tell(ranks: Ranks, code: int, line: str) -> None:
    """Leave a note, unless another rank has failed before."""
    note = {"rank": ranks.rank, "host": host_name(), "code": code, "line": line}
    with suppress(RuntimeError):  # the store is gone, and rank 0 with it
        if ranks.store is not None:
            ranks.store.compare_set("failure", "", json.dumps(note))


def _ask(ranks: Ranks) -> dict[str, Any] | None:
    """Read the note of the first failing rank; None without one, as where it was killed."""
    deadline = time.monotonic() + NOTE_SECONDS
    with suppress(RuntimeError):
        while ranks.store is not None and time.monotonic() < deadline:
            if ranks.store.check(["failure"]):
                return dict(json.loads(ranks.store.get("failure")))
            time.sleep(0.05)
    return None


def _leave(ranks: Ranks) -> None:
    """Break the connections, so that peers notice; rank 0, which has the store, goes last."""
    stop_ranks()
    if ranks.store is not None:
        with suppress(RuntimeError):
            wait_for_all(ranks.store, "ended", ranks.rank, ranks.world_size, 2 * NOTE_SECONDS)


def _say(line: str) -> None:
    with suppress(OSError):  # where a launcher has died there may be nobody to read it
        show(line, file=sys.stderr)
