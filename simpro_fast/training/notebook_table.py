"""The progress of a run as a table below the cell of a notebook."""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

from rich.table import Table

from simpro_fast.training.progress import Progress

SHOWN = 20
"""Newest periods in the table."""


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None


class NotebookTable(Progress):
    """One row per period, and a last one that moves.

    Args:
        total, views_per_step: as for `Progress`.
    """

    def __init__(self, total: int, views_per_step: int) -> None:
        super().__init__("on", total, views_per_step, main=True)
        self._rows: deque[dict[str, str]] = deque(maxlen=SHOWN)
        self._passing = False
        self._handle: Any = None

    def due(self) -> bool:
        self._passing = super().due()
        return self._passing

    def close(self) -> None:
        """The table stays as it is."""

    def _draw(self, values: dict[str, str]) -> None:
        rows = [*self._rows, values]
        titles = list(dict.fromkeys(title for row in rows for title in row))
        table = Table(*titles, box=None, padding=(0, 2, 0, 0))
        for row in rows:
            table.add_row(*(row.get(title, "") for title in titles))
        if not self._passing:
            self._rows.append(values)
        self._passing = False
        if self._handle is None:
            from IPython.display import display

            self._handle = display(table, display_id=True)
        else:
            self._handle.update(table)


def build_progress(mode: str, total: int, views_per_step: int, *, main: bool) -> Progress:
    """Build what `log.progress` asks for: in a notebook a table, else a line."""
    if mode == "auto" and main and in_notebook():
        return NotebookTable(total, views_per_step)
    return Progress(mode, total, views_per_step, main=main)
