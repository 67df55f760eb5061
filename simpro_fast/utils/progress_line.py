"""A line on a terminal that says how far a command has come."""

from __future__ import annotations

import sys

from tqdm import tqdm


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
        hidden = not (shown and sys.stderr.isatty())
        self._bar = tqdm(desc=verb, unit=f" {items}", initial=start, leave=False, disable=hidden)

    def __call__(self, done: int, total: int | None = None) -> None:
        """Show that `done` are done, of `total` where that is known."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Remove the line."""
        self._bar.close()
