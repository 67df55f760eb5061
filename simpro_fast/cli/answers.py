"""Flags, output folder and end of the verbs that run a trained network over images."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from simpro_fast.answers.predict import Unreadable
from simpro_fast.answers.report.verb_figures import check_matplotlib
from simpro_fast.cli.ending import DONE, FAILED
from simpro_fast.cli.parser import CommandParser
from simpro_fast.config.saved import read_saved_tree
from simpro_fast.utils.atomic_write import check_output
from simpro_fast.utils.claimed_files import State, check_new, claimed
from simpro_fast.utils.errors import ConfigError
from simpro_fast.utils.printable import show

Files = Mapping[Path, State]


def common_flags(parser: CommandParser) -> None:
    parser.add_argument(
        "--output", type=Path, default=Path(), metavar="DIR", help="where files go (here)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace files that are there")
    parser.add_argument("--no-figures", action="store_true", help="write no figure")
    model_flags(parser)


def model_flags(parser: CommandParser) -> None:
    """Flags of all verbs that run a network over images."""
    parser.add_argument(
        "--on-bad-image",
        choices=("error", "skip"),
        help="skip: files that cannot be read do not make the exit code 1; they are counted, and "
        "rows of a table say why, either way (default: data.on_bad_image of the run)",
    )
    parser.add_common("device", "batch_size", "threads", "json", "quiet", "trust_code")


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


def conclude(
    options: argparse.Namespace,
    model: str | Path,
    notes: Sequence[str],
    unreadable: Unreadable,
    images: int,
) -> int:
    """Say the rest on stderr; returns the exit code.

    Args:
        model: run directory or its model.safetensors.
        images: how many there are, with those that could not be read.
    """
    for line in () if options.quiet else notes:
        show(line, file=sys.stderr)
    if not unreadable.count:
        return DONE
    line = f"{unreadable.count:,} of {images:,} images could not be read "
    line += f"(first: {unreadable.first})"
    if (options.on_bad_image or _of_the_run(Path(model))) == "skip":
        if not options.quiet:
            show(f"note: {line}", file=sys.stderr)
        return DONE
    show(f"error: {line}; --on-bad-image skip accepts them", file=sys.stderr)
    return FAILED


def _of_the_run(model: Path) -> object:
    """`data.on_bad_image` of the run; None where nothing says it."""
    with suppress(ConfigError):  # an export has no configuration, another version another one
        folder = model if model.is_dir() else model.parent
        return read_saved_tree(folder / "config.yaml").get("data", {}).get("on_bad_image")
    return None
