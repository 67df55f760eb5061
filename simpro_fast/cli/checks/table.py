"""One line of the doctor's table, and how the lines of many ranks become one."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from typing import TextIO

from rich.table import Table
from rich.text import Text

from simpro_fast.utils.printable import printable
from simpro_fast.utils.terminal import rendered

VERDICTS = ("ok", "skipped", "warning", "problem")
"""From best to worst."""
_STYLES = dict(zip(VERDICTS, ("green", "dim", "yellow", "bold red"), strict=True))


@dataclass(frozen=True)
class Line:
    """Result of a check. `cure` says what to do where the verdict is a warning or a problem."""

    verdict: str
    found: str
    cure: str = ""
    check: str = ""

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()


def merge(texts: list[bytes], hosts: list[str]) -> Line:
    """The worst line of all ranks; names its rank and host unless all ranks found the same."""
    lines = [Line(**json.loads(text)) for text in texts]
    worst = max(range(len(lines)), key=lambda rank: VERDICTS.index(lines[rank].verdict))
    line = lines[worst]
    if VERDICTS.index(line.verdict) < VERDICTS.index("warning"):
        return lines[0]
    same = sum(other.verdict == line.verdict for other in lines)
    if len(lines) == 1 or same == len(lines):
        return line
    others = f", {same - 1} more rank(s)" if same > 1 else ""
    return replace(line, found=f"rank {worst} on {hosts[worst]}{others}: {line.found}")


def table(lines: list[Line], file: TextIO | None = None) -> str:
    """The lines under each other, with each cure below its finding, as `file` (stdout) shows it."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for line in lines:
        grid.add_row(
            Text(line.verdict, style=_STYLES[line.verdict]), line.check, printable(line.found)
        )
        if line.cure:
            grid.add_row("", "", f"-> {printable(line.cure)}")
    return rendered(grid, sys.stdout if file is None else file)


def closing(lines: list[Line]) -> str:
    """The last line: may training start, and what tells its speed?"""
    problems = sum(line.verdict == "problem" for line in lines)
    warnings = sum(line.verdict == "warning" for line in lines)
    if problems:
        return f"{problems} problem(s), {warnings} warning(s): cure the problems before training"
    found = f"no problem, {warnings} warning(s)" if warnings else "no problem"
    return f"{found}: training can start; simpro-fast train ... --dry-run times its steps"
