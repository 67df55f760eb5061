"""`simpro-fast doctor` and `launch/doctor.py`: check a machine or an allocation before training.

It runs under plain python, deepspeed, torchrun and srun; started as training is, it checks all
ranks. One failing check does not hide the others.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict
from pathlib import Path

from simpro_fast.cli.checks.examine import DEFAULT, examine
from simpro_fast.cli.checks.table import closing, table
from simpro_fast.cli.ending import verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.config import load_config
from simpro_fast.distributed.environment import rank_from_environment
from simpro_fast.distributed.process_group import stop_ranks
from simpro_fast.utils.errors import UserError

DESCRIPTION = """\
Check a machine, or all ranks of an allocation, before training: devices, libraries, links, memory,
disk, data and kernels. How long a step takes, simpro-fast train ... --dry-run says.

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
        help=f"experiment whose data, ranks and checkpoints are checked ({DEFAULT})",
    )
    parser.add_argument("--output", type=Path, help="run folder; default: output_dir of --config")
    parser.add_common("json")
    parser.add_overrides()
    return parser.parse(arguments)


@verb
def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print. Returns the exit code."""
    options = parse_arguments(arguments)
    config = load_config(options.config or DEFAULT, options.overrides)
    logging.getLogger("simpro_kernels").setLevel(logging.WARNING)
    started = time.perf_counter()
    folder = options.output or config.output_dir
    try:
        # Libraries talk on stdout, which --json keeps for its document.
        with redirect_stdout(sys.stderr) if options.json else nullcontext():
            ranks, lines = examine(config, folder)
    except UserError as error:  # the ranks did not find each other
        if rank_from_environment() == 0:
            raise
        return error.exit_code
    finally:
        stop_ranks()
    if ranks.is_main and options.json:
        print(json.dumps({"checks": [asdict(line) for line in lines]}, indent=1))
    elif ranks.is_main:
        print(table(lines))
        print(f"{closing(lines)} ({time.perf_counter() - started:.0f} s)")
    return int(any(line.verdict == "problem" for line in lines))
