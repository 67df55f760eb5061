"""What `evaluate` and `shares` share: flags, the output folder, the end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from simpro_fast.answers.predict import Unreadable
from simpro_fast.answers.report.verb_figures import check_matplotlib
from simpro_fast.cli.ending import DONE, FAILED
from simpro_fast.cli.parser import CommandParser
from simpro_fast.utils.atomic_write import check_output
from simpro_fast.utils.claimed_files import State, check_new, claimed
from simpro_fast.utils.printable import show

Files = Mapping[Path, State]


def common_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where files go (here)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_argument("--no-figures", action="store_true", help="write no figure")
    parser.add_argument(
        "--on-bad-image",
        choices=("error", "skip"),
        default="error",
        help="skip: files that cannot be read do not make the exit code 1; they are left out and "
        "counted either way",
    )
    parser.add_common("json", "quiet", "device", "batch_size", "threads", "trust_code")


@contextmanager
def output_files(options: argparse.Namespace, table: str, *figures: str) -> Iterator[Files]:
    """Before seconds of work: the files that are to be written can be, and nobody else does.

    Yields:
        what is there by their names, for `check_same` before they are written.

    Raises:
        UserError: a package is missing, a file is there already, or another process writes it.
        OutputError: the folder is no place to write to.
    """
    if not options.no_figures:
        check_matplotlib()
    check_output(options.output, folder=True)
    names = [table, *(() if options.no_figures else figures)]
    with claimed(options.output / name for name in names) as found:
        if not options.overwrite:
            check_new(found)
        yield found


def conclude(options: argparse.Namespace, notes: Sequence[str], unreadable: Unreadable) -> int:
    """Say the rest on stderr; returns the exit code."""
    for line in () if options.quiet else notes:
        show(line, file=sys.stderr)
    count = unreadable.counts.total()
    if not count:
        return DONE
    images = "1 image" if count == 1 else f"{count:,} images"
    line = f"{images} could not be read, left out (first: {unreadable.first})"
    if options.on_bad_image == "skip":
        if not options.quiet:
            show(f"note: {line}", file=sys.stderr)
        return DONE
    show(f"error: {line}; --on-bad-image skip accepts them", file=sys.stderr)
    return FAILED
