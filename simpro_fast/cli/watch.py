"""`simpro-fast watch`: how runs stand, from their files alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from simpro_fast.answers.report.runs import METHOD_TITLES, find_runs, load_run
from simpro_fast.cli.ending import DONE, about, verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.distributed.signals import INTERRUPTED
from simpro_fast.run.files import METRICS
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.printable import printable
from simpro_fast.utils.progress import clock
from simpro_fast.utils.terminal import plain_table, rendered

EXAMPLE = "runs/digits_lt"
SECONDS = 3.0
"""Between two looks."""
_COLUMNS = {
    "top1": ("top-1 %", ".1f"),
    "mask_rate": ("mask rate", ".2f"),
    "kl_pi_u": ("KL(pi_u)", ".3f"),
    "images_per_second": ("views/s", ",.0f"),
}


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Show runs until all are finished; returns the exit code."""
    parser = CommandParser(
        "simpro-fast watch",
        "A table of runs, redrawn every few seconds until all are finished or Ctrl-C: steps and\n"
        "the numbers of the last period. It reads their files, so it may run on any machine that\n"
        "sees them.",
        f"examples:\n  simpro-fast watch {EXAMPLE}\n  simpro-fast watch {EXAMPLE} --once",
    )
    parser.add_argument(
        "runs", type=Path, nargs="*", metavar="RUN|FOLDER", help="run directories, folders of them"
    )
    parser.add_argument(
        "--once", action="store_true", help="print it once; the default where there is no terminal"
    )
    options = parser.parse(arguments)
    if not options.runs:
        raise ConfigError(f"no run directory; for example simpro-fast watch {EXAMPLE}")
    with about(*options.runs):
        table, left = overview(options.runs)
        if left and not options.once and sys.stdout.isatty():
            with suppress(KeyboardInterrupt), Live(table, console=Console(markup=False)) as live:
                while left:
                    time.sleep(SECONDS)
                    table, left = overview(options.runs)
                    live.update(table, refresh=True)
            return INTERRUPTED if left else DONE
        print(rendered(table, sys.stdout))
    return DONE


def overview(paths: Sequence[Path]) -> tuple[Table, bool]:
    """One row for each run of these folders, and whether one is not finished.

    Raises:
        UserError: there is none, or a file of one is damaged.
    """
    titles = (title for title, _ in _COLUMNS.values())
    # What matters most comes first: a narrow terminal cuts off the end.
    table = plain_table("run", "seed", "method", "step", "last row", *titles)
    left = False
    for path in find_runs(paths):
        try:
            run = load_run(path)
        except UserError:  # of one that has only begun, or a damaged one, which `report` names
            table.add_row(printable(path), "", "", "", "none yet", *[""] * len(_COLUMNS))
            left = True
            continue
        left |= bool(run.state)
        summary = run.summary
        last = run.metrics[-1] if run.metrics else {}
        table.add_row(
            str(summary["name"]),
            str(summary["seed"]),
            METHOD_TITLES.get(summary["method"], str(summary["method"])),
            f"{summary['steps']}/{run.config.get('train', {}).get('steps', summary['steps'])}",
            _age(path / METRICS) if run.state else "finished",
            *(_number({**last, "top1": summary["top1"]}, key) for key in _COLUMNS),
        )
    return table, left


def _number(row: dict[str, Any], key: str) -> str:
    value = row.get(key)
    return "-" if value is None else format(value, _COLUMNS[key][1])


def _age(path: Path) -> str:
    """How long ago it was written: a run that is killed writes no more."""
    with suppress(OSError):
        return f"{clock(max(0.0, time.time() - path.stat().st_mtime))} ago"
    return "none yet"
