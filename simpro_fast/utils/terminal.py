"""Output for people: styled and fitted to the width of a terminal, plain text anywhere else."""

from __future__ import annotations

import os
import re
from typing import TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

_UNBROKEN = 10_000


def plain_table(*headers: str) -> Table:
    """A table without lines and frame: the first column is text, the others are numbers."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="")
    for number, header in enumerate(headers):
        title = Text(header, style="bold", no_wrap=True)
        table.add_column(
            title,
            justify="right" if number else "left",
            min_width=9 if number else 18,
            no_wrap=True,
        )
    return table


def rendered(what: RenderableType, file: TextIO, width: int | None = None) -> str:
    """Text as `file` can show it, without spaces at the end of lines.

    Args:
        width: in columns; None: the terminal's, and without one no line is broken.
    """
    terminal = file.isatty()
    console = Console(
        file=file,
        width=width if width or terminal else _UNBROKEN,
        force_terminal=terminal,
        force_jupyter=False,  # a notebook would show it twice
        color_system="standard" if terminal and "NO_COLOR" not in os.environ else None,
        markup=False,
        emoji=False,
        highlight=False,
    )
    with console.capture() as capture:
        console.print(what)
    return re.sub(r" +(\033\[0m)?$", r"\1", capture.get().rstrip("\n"), flags=re.MULTILINE)
