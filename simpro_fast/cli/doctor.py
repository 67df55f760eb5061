"""`simpro-fast doctor` and `launch/doctor.py`: check a machine or an allocation before training.

It runs under plain python, deepspeed, torchrun and srun; started as training is, it checks all
ranks. One failing check does not hide the others.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from simpro_fast.cli.parser import CommandParser
from simpro_fast.config import load_config
from simpro_fast.distributed.environment import rank_from_environment
from simpro_fast.distributed.process_group import stop_ranks
from simpro_fast.doctor.examine import DEFAULT, examine
from simpro_fast.doctor.table import closing, table
from simpro_fast.errors import ConfigError, UserError
from simpro_fast.printable import show
from simpro_fast.utils.atomic_write import write_json

DESCRIPTION = """\
Check a machine, or all ranks of an allocation, before training: devices, libraries, memory, disk,
data, and the speed of a step.

examples:
  simpro-fast doctor
  simpro-fast doctor --config photos.yaml
  deepspeed launch/doctor.py --config cifar10_lt/reversed data.root=/data/cifar"""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = CommandParser(
        "simpro-fast doctor",
        DESCRIPTION,
        "Exit code: 0 training can start, 1 a problem, 2 wrong usage.",
    )
    parser.add_argument(
        "--config",
        help="experiment, whose own data, network and batches are checked and timed; without one a "
        f"small trial is ({DEFAULT})",
    )
    parser.add_argument("--output", type=Path, help="run folder; default: output_dir of --config")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_overrides()
    return parser.parse(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print. Returns the exit code."""
    try:
        options = parse_arguments(arguments)
        config = load_config(options.config or DEFAULT, options.overrides)
    except ConfigError as error:
        show(f"error: {error}", file=sys.stderr)
        return error.exit_code
    logging.getLogger("simpro_kernels").setLevel(logging.WARNING)
    started = time.perf_counter()
    folder = options.output or config.output_dir
    try:
        ranks, lines = examine(config, folder, given=options.config is not None)
    except UserError as error:  # the ranks did not find each other
        if rank_from_environment() == 0:
            show(f"error: {error}", file=sys.stderr)
        return 1
    finally:
        stop_ranks()
    if ranks.is_main:
        print(table(lines))
        print(f"{closing(lines)} ({time.perf_counter() - started:.0f} s)")
        if options.json is not None:
            try:
                write_json(options.json, {"checks": [asdict(line) for line in lines]})
            except UserError as error:
                show(f"error: {error}", file=sys.stderr)
                return 1
    return int(any(line.verdict == "problem" for line in lines))
