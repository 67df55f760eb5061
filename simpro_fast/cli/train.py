"""`simpro-fast train` and `launch/train.py`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from simpro_fast.cli.ending import DONE, explained
from simpro_fast.cli.key_hints import key_lines
from simpro_fast.cli.parser import CommandParser
from simpro_fast.cli.sweep import add_sweep_flags, launcher_of, members_of, wants_sweep
from simpro_fast.config import dump_config, load_config
from simpro_fast.distributed.signals import INTERRUPTED
from simpro_fast.utils.errors import ConfigError, PeerError, UserError

DESCRIPTION = """\
Train SimPro, or a method to compare it with: in this process, or on many devices under deepspeed or
torchrun. The same command goes on from the newest checkpoint.

examples:
  simpro-fast train digits_lt/reversed
  simpro-fast train photos.yaml seed=2 optim.lr=0.01 name=second
  simpro-fast train photos.yaml --dry-run
  simpro-fast train digits_lt/reversed --grid method.tau=1,2 --seeds 1,2,3
  deepspeed --num_gpus 8 launch/train.py --config cifar10_lt/reversed data.root=/data/cifar"""
EPILOG = """\
Exit code: 0 done, 1 failed, 2 wrong usage, a wrong configuration or an output that cannot be
written, 75 preempted (run it again), 130 interrupted.

Keys, for key.sub=value and YAML files; simpro-fast keys KEY says what one means, simpro-fast train
CONFIG --print-config shows all values, configs/README.md the shipped configurations:
"""


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; an unknown flag is a `ConfigError` that names the nearest one."""
    parser = CommandParser("simpro-fast train", DESCRIPTION, EPILOG + "\n".join(key_lines()))
    parser.add_argument(
        "--config", help="YAML file or the name of a shipped one; --config may be left out"
    )
    parser.add_argument(
        "--print-config",
        action="store_true",
        help="print all keys with their values and exit; refuses what cannot be trained whatever "
        "the data are",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train some steps, say how long the run takes, and write nothing",
    )
    add_sweep_flags(parser)
    parser.add_overrides()
    options = parser.parse(arguments)
    if options.config is None:
        words = [word for word in options.overrides if "=" not in word]
        said = f"{words[0]} is neither a YAML file nor a shipped configuration" if words else ""
        raise ConfigError(f"{said or '--config is missing'}; for example digits_lt/reversed")
    single = {"print-config": options.print_config, "dry-run": options.dry_run}
    alone = [flag for flag, given in single.items() if given]
    if wants_sweep(options) and alone:
        raise ConfigError(f"--{alone[0]} is for one run, without --grid, --seeds and --launcher")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the training command.

    Returns:
        the exit code: 0 done, 1 failure, 2 usage or configuration, 75 preempted (the same command
        goes on), 130 interrupted by Ctrl-C.
    """
    from simpro_fast.distributed.environment import (
        local_rank_from_environment,
        rank_from_environment,
        world_size_from_environment,
    )

    rank, local_rank, many = 0, 0, False
    try:
        rank, many = rank_from_environment(), world_size_from_environment() > 1
        local_rank = local_rank_from_environment()
        options = parse_arguments(arguments)
        if wants_sweep(options):
            return _sweep(options)
        config = load_config(options.config, options.overrides)
        if options.print_config:
            from simpro_fast.training.setup import check_config

            check_config(config)
            if rank == 0:
                print(dump_config(config), end="", flush=True)
            return DONE
        from simpro_fast.training.launch import run_training

        return run_training(config, dry_run=options.dry_run)
    except UserError as error:
        # The ranks of a host read the same command line and files, so one of them speaks for all.
        if isinstance(error, PeerError) or (isinstance(error, ConfigError) and local_rank):
            return error.exit_code
        return explained(error, f" [rank {rank}]" if many else "")
    except OSError as error:
        return explained(error)
    except KeyboardInterrupt:
        print("interrupted; start again to resume from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _sweep(options: argparse.Namespace) -> int:
    from simpro_fast.cli.members import print_commands, train_members

    members = members_of(options.config, options.grid, options.seeds, options.overrides)
    act = print_commands if options.print_commands else train_members
    return act(members, launcher_of(options))
