"""A line on a terminal that says how far a command has come."""

from __future__ import annotations

import sys
import time


class ProgressLine:
    """One line on stderr that is written over; nothing where stderr is no terminal.

    Args:
        verb: what is done to the items, `decoded`.
        items: what they are.
        start: how many an earlier run has done, which says nothing about the speed of this one.
        shown: False: nothing anywhere.
    """

    def __init__(
        self, verb: str, items: str = "files", *, start: int = 0, shown: bool = True
    ) -> None:
        self._verb, self._items, self._start = verb, items, start
        self._started, self._shown = time.perf_counter(), 0.0
        self._live = shown and sys.stderr.isatty()

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show that `done` are done, of `total` where that is known."""
        now = time.perf_counter()
        if self._live and (now - self._shown > 0.1 or done == total):
            self._shown = now
            rate = (done - self._start) / max(now - self._started, 1e-9)
            of = "" if total is None else f"/{total}"
            left = "" if total is None or not rate else f", {(total - done) / rate:.0f} s left"
            text = f"{self._verb} {done}{of} {self._items}, {rate:.0f}/s{left}"
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line."""
        if self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
            self._shown = 0.0
