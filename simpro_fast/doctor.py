"""`launch/doctor.py`: is this machine, or this whole allocation, fit for training?

It runs under plain python, deepspeed, torchrun and srun; started as training is, it checks all
ranks. One failing check does not hide the others.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch.distributed as dist

from simpro_fast import doctor_machine, doctor_ranks
from simpro_fast.cli import CommandParser
from simpro_fast.config import Config, load_config
from simpro_fast.doctor_line import Line, closing, merge, table
from simpro_fast.errors import ConfigError, UserError
from simpro_fast.files import write_json
from simpro_fast.training.ranks import (
    Ranks,
    rank_from_environment,
    start_ranks,
    stop_ranks,
    world_size_from_environment,
)
from simpro_fast.training.rendezvous import host_name

DEFAULT = "digits_lt/reversed"
DIGITS_RANKS = 64
"""It has 131 labeled images, and every rank needs one."""


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = CommandParser(
        prog="doctor.py",
        description="Check a machine, or all ranks of an allocation, before training.",
        epilog="Exit code: 0 fit for training, 1 a problem, 2 wrong usage.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default=DEFAULT, help="the experiment that is to run")
    parser.add_argument("--output", type=Path, help="folder of the runs; default: its output_dir")
    parser.add_argument("--json", type=Path, help="also write the table to this file")
    parser.add_argument("--local_rank", "--local-rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check and print. Returns the exit code."""
    try:
        options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
        config = load_config(options.config, options.overrides)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    logging.getLogger("simpro_kernels").setLevel(logging.WARNING)
    started = time.perf_counter()
    folder = options.output or config.output_dir
    try:
        ranks, lines = _examine(config, folder)
    except UserError as error:  # the ranks did not find each other
        if rank_from_environment() == 0:
            print(f"error: {error}", file=sys.stderr)
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
                print(f"error: {error}", file=sys.stderr)
                return 1
    return int(any(line.verdict == "problem" for line in lines))


def _trial(config: Config) -> Config:
    """Three steps on data that every installation has, as this launch would train.

    Digits, or made-up images where there are more ranks than labeled digits.
    """
    world = world_size_from_environment()
    changes = [
        f"data.batch_size={max(1, 32 // world) * world}",
        "data.mu=2",
        "train.steps=3",
        "train.period=3",
        f"device={config.device}",
        f"distributed.engine={config.distributed.engine}",
        f"distributed.start_timeout={config.distributed.start_timeout}",
        "distributed.collective_timeout=60",
        "log.progress=off",
    ]
    if world > DIGITS_RANKS:
        changes += ["data.name=synthetic", "data.test_per_class=null"]
        changes += [f"data.labeled_max={world}", f"data.unlabeled_max={2 * world}"]
    if config.train.threads is not None:
        changes.append(f"train.threads={config.train.threads}")
    if config.distributed.listen is not None:
        changes.append(f"distributed.listen={config.distributed.listen}")
    return load_config(DEFAULT, changes)


def _examine(config: Config, folder: Path) -> tuple[Ranks, list[Line]]:
    trial = _trial(config)
    ranks = start_ranks(trial)
    from simpro_fast import (
        doctor_data,
        doctor_work,
    )  # DALI and the trainer, after the device is known

    checks: list[tuple[str, Callable[[], Line]]] = [
        ("machine", doctor_machine.check_machine),
        ("versions", doctor_machine.check_versions),
        ("ranks", lambda: doctor_ranks.check_ranks(config, ranks)),
        ("links", lambda: doctor_ranks.check_links(ranks)),
        ("clocks", lambda: doctor_ranks.check_clocks(ranks)),
        ("folder", lambda: doctor_ranks.check_folder(ranks, folder)),
        ("disk", lambda: doctor_machine.check_disk(config, folder)),
        ("data", lambda: doctor_data.check_data(config, ranks)),
        ("decoding", lambda: doctor_work.check_decoding(ranks)),
        ("views", lambda: doctor_work.check_views(trial, ranks)),
        ("training", lambda: doctor_work.check_training(trial, ranks)),
        ("kernels", lambda: doctor_work.check_kernels(ranks)),
    ]
    hosts = [text.decode() for text in ranks.gather_bytes(host_name().encode())]
    lines: list[Line] = []
    for name, check in checks:
        line = replace(_guarded(check), check=name)
        try:
            lines.append(merge(ranks.gather_bytes(line.to_bytes()), hosts))
        except (RuntimeError, dist.DistError):
            lost = "the ranks lost each other in this check; the rest is not checked"
            cure = f"this rank: {line.found}" if line.verdict == "problem" else ""
            lines.append(Line("problem", lost, cure or "see the messages of the others", name))
            break
    return ranks, lines


def _guarded(check: Callable[[], Line]) -> Line:
    """The check's line, or a problem that says how the check itself failed."""
    try:
        return check()
    except UserError as error:
        return Line("problem", str(error))
    except Exception as error:  # whatever is wrong with this machine is what we are here for
        reason = (str(error) or "no message").splitlines()[0][:200]
        return Line("problem", f"failed with {type(error).__name__}: {reason}")
