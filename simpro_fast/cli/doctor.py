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
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stdout
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist

from simpro_fast.cli.checks import machine
from simpro_fast.cli.checks import ranks as among_ranks
from simpro_fast.cli.checks.table import Line, closing, merge, table
from simpro_fast.cli.ending import verb
from simpro_fast.cli.parser import CommandParser
from simpro_fast.config import Config, load_config
from simpro_fast.distributed.environment import rank_from_environment
from simpro_fast.distributed.process_group import Ranks, start_ranks, stop_ranks
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.machine import host_name

DEFAULT = "digits_lt/reversed"
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


def examine(config: Config, folder: Path) -> tuple[Ranks, list[Line]]:
    """Run all checks, one after another, as this launch would train.

    Args:
        folder: of the run.

    Returns:
        this rank among all, and the table's lines (merged over ranks, equal on all of them).

    Raises:
        UserError: the ranks did not find each other.
    """
    # A link that hangs is found soon, whatever training waits for.
    limits = config.distributed.model_copy(update={"collective_timeout": 60.0})
    ranks = start_ranks(config.model_copy(update={"distributed": limits}))
    # DALI and the kernels, after the device is known
    from simpro_fast.cli.checks import computing, data

    lines: list[Line] = []
    checks: list[tuple[str, Callable[[], Line]]] = [
        ("machine", machine.check_machine),
        ("versions", machine.check_versions),
        ("ranks", lambda: among_ranks.check_ranks(config, ranks)),
        ("links", lambda: among_ranks.check_links(ranks)),
        ("folder", lambda: among_ranks.check_folder(ranks, folder)),
        ("disk", lambda: machine.check_disk(config, folder)),
        ("data", lambda: data.check_data(config, ranks)),
        ("kernels", lambda: computing.check_kernels(ranks)),
    ]
    hosts = [text.decode() for text in ranks.gather_bytes(host_name().encode())]
    for name, check in checks:
        line = replace(guarded(check), check=name)
        try:
            lines.append(merge(ranks.gather_bytes(line.to_bytes()), hosts))
        except (RuntimeError, dist.DistError):
            lost = "the ranks lost each other in this check; the rest is not checked"
            cure = f"this rank: {line.found}" if line.verdict == "problem" else ""
            lines.append(Line("problem", lost, cure or "see the messages of the others", name))
            break
    return ranks, lines


def guarded(check: Callable[[], Line]) -> Line:
    """The check's line, or a problem that says how the check itself failed."""
    try:
        return check()
    except UserError as error:
        return Line("problem", str(error))
    except Exception as error:  # whatever is wrong with this machine is what we are here for
        reason = (str(error) or "no message").splitlines()[0][:200]
        return Line("problem", f"failed with {type(error).__name__}: {reason}")
