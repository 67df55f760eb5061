"""`simpro-fast report`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from simpro_fast.answers.report import write_report
from simpro_fast.answers.report.groups import check_same_split, group_runs, seeds_that_differ
from simpro_fast.answers.report.paired import left_out
from simpro_fast.answers.report.pictures import FOLDER
from simpro_fast.answers.report.runs import Run, find_runs, load_run
from simpro_fast.answers.report.tables import FORMATS, experiments, published_commands
from simpro_fast.answers.report.terminal import print_report, report_data
from simpro_fast.cli.ending import DONE, about, verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.utils.atomic_write import check_output
from simpro_fast.utils.errors import ConfigError, UserError
from simpro_fast.utils.printable import show

EXAMPLE = "runs/digits_lt/reversed/seed1"


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table of runs, and draw their figures and their page; returns the exit code."""
    parser = CommandParser(
        "simpro-fast report",
        "Table, figures and one HTML page of any number of runs, finished or not.\n\n"
        f"examples:\n  simpro-fast report {EXAMPLE}\n  simpro-fast report runs/digits_lt\n"
        f"  simpro-fast report {EXAMPLE} runs/digits_lt/fixmatch/seed1\n"
        "  simpro-fast report runs --format latex > results.tex\n"
        "  simpro-fast report --published CIFAR10-LT",
    )
    parser.add_argument(
        "runs",
        type=Path,
        nargs="*",
        metavar="RUN|FOLDER",
        help=f"run directories, such as {EXAMPLE}, or folders of them",
    )
    parser.add_argument(
        "--compare", type=Path, action="append", default=[], help="one more of them"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FOLDER",
        help=f"where to write; default: {FOLDER}/ in what is named, {FOLDER}/compare/ in the first "
        "of several",
    )
    parser.add_argument(
        "--force", action="store_true", help="show runs beside each other whose splits differ"
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="print one row for each experiment, whatever its split, beside the published number "
        "of its configuration; write no files",
    )
    parser.add_argument(
        "--published",
        metavar="TABLE",
        help="print the commands that train the cells of a published table, such as CIFAR10-LT, "
        "each with the published accuracy; --dry-run at a command says how long it takes here",
    )
    parser.add_common("json")
    options = parser.parse(arguments)
    named = [*options.runs, *options.compare]
    if options.published is not None:
        if named:
            raise ConfigError(f"--published is about the paper's runs, without {named[0]}")
        print("\n".join(published_commands(options.published)))
        return DONE
    if not named:
        raise ConfigError(f"no run directory; for example simpro-fast report {EXAMPLE}")
    found = find_runs(named)
    with about(*found):
        return _report(found, named, options)


def _report(found: Sequence[Path], named: Sequence[Path], options: argparse.Namespace) -> int:
    runs = []
    for path in found:
        with about(path):
            runs.append(load_run(path))
    if options.format:
        return _print_table(runs, options.format)
    groups = group_runs(runs)
    notes = check_same_split(groups, force=options.force)
    notes += [*filter(None, map(seeds_that_differ, groups)), *left_out(groups)]
    if options.json:
        print(json.dumps(report_data(groups, notes), indent=1))
        return DONE
    default = named[0] / FOLDER if len(named) == 1 else named[0] / FOLDER / "compare"
    folder = options.output or default
    check_output(folder, folder=True)
    print_report(groups, notes)
    for path in write_report(groups, folder, notes):
        if path.suffix == ".html":
            show(f"page {path}, its figures beside it")
    return DONE


def _print_table(runs: Sequence[Run], form: str) -> int:
    finished = [run for run in runs if not run.state]
    if not finished:
        raise UserError(f"{runs[0].path}: no run is finished, so there is no row to show")
    groups = group_runs(finished)
    left_out = (f"{run.path}: {run.state}; left out" for run in runs if run.state)
    for note in (*left_out, *filter(None, map(seeds_that_differ, groups))):
        show(f"note: {note}", file=sys.stderr)
    print(experiments(groups, form), end="")
    return DONE
