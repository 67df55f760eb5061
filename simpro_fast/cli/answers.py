"""What `evaluate` and `heap` share: flags, the output folder, the end."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from simpro_fast.cli.ending import DONE, FAILED
from simpro_fast.cli.parser import CommandParser
from simpro_fast.errors import UserError
from simpro_fast.printable import show
from simpro_fast.report.answers import check_matplotlib


def common_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where files go (here)"
    )
    parser.add_argument("--no-figures", action="store_true", help="write no figure")
    parser.add_argument(
        "--on-bad-image",
        choices=("error", "skip"),
        default="error",
        help="skip: files that cannot be read do not make the exit code 1; they are left out and "
        "counted either way",
    )
    parser.add_common("json", "quiet", "device", "batch_size", "threads", "trust_code")


def prepare_folder(options: argparse.Namespace) -> None:
    """Before seconds of work: the output folder can be written, figures can be drawn.

    Raises:
        UserError: one of them is not so.
    """
    if not options.no_figures:
        check_matplotlib()
    folder: Path = options.output
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}; give another folder") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(f"--output {folder}: may not be written to; give another folder")


def conclude(
    options: argparse.Namespace, notes: Sequence[str], bad: Counter[str], first_bad: str
) -> int:
    """Say the rest on stderr; returns the exit code."""
    for line in () if options.quiet else notes:
        show(line, file=sys.stderr)
    count = sum(bad.values())
    if not count:
        return DONE
    line = f"{count:,} images could not be read and are left out (first: {first_bad})"
    if options.on_bad_image == "skip":
        if not options.quiet:
            show(f"note: {line}", file=sys.stderr)
        return DONE
    show(f"error: {line}; --on-bad-image skip accepts them", file=sys.stderr)
    return FAILED
