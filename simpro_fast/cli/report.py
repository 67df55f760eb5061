"""`simpro-fast report` and `launch/report.py`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from simpro_fast.cli.parser import CommandParser
from simpro_fast.errors import ConfigError, UserError
from simpro_fast.printable import show
from simpro_fast.report.figures import write_report
from simpro_fast.report.runs import load_run
from simpro_fast.report.terminal import print_summary

EXAMPLE = "runs/digits_lt/reversed/seed1"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of a finished run and draw its figures; returns the exit code."""
    parser = CommandParser(
        "simpro-fast report",
        "Table and figures of a finished run.\n\n"
        f"examples:\n  simpro-fast report {EXAMPLE}\n"
        f"  simpro-fast report {EXAMPLE} --compare runs/digits_lt/reversed_fixmatch/seed1",
    )
    parser.add_argument("run", type=Path, nargs="?", help=f"run directory, such as {EXAMPLE}")
    parser.add_argument("--compare", type=Path, help="a second run, shown beside the first")
    try:
        options = parser.parse(arguments)
        if options.run is None:
            raise ConfigError(f"no run directory; for example simpro-fast report {EXAMPLE}")
        run = load_run(options.run)
        other = load_run(options.compare) if options.compare else None
        if other and other.summary["class_names"] != run.summary["class_names"]:
            raise UserError(f"{options.compare} has other classes than {options.run}")
        print_summary(run.summary, compare=other.summary if other else None)
        for path in write_report(options.run, compare=options.compare):
            show(f"figure {path}")
    except UserError as error:
        show(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        show(f"error: {error}; check the path and its permissions", file=sys.stderr)
        return 1
    return 0
