"""`simpro-fast train` and `launch/train.py`."""

from __future__ import annotations

import argparse
import logging
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from simpro_fast.cli.parser import CommandParser
from simpro_fast.cli.sweep import add_sweep_flags, launcher_of, members_of, wants_sweep
from simpro_fast.config import Config, dump_config, load_config, load_smoke_config
from simpro_fast.config.smoke import refuse_smoke_folder
from simpro_fast.errors import ConfigError, PeerError, UserError
from simpro_fast.printable import show
from simpro_fast.utils.logs import log_to_terminal

if TYPE_CHECKING:
    from simpro_fast.distributed.process_group import Ranks

DONE, FAILED, INTERRUPTED = 0, 1, 130


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse; an unknown flag is a `ConfigError` that names the nearest one."""
    parser = CommandParser(
        "simpro-fast train",
        "Train SimPro or a baseline. Run it under deepspeed, torchrun or python.",
    )
    parser.add_argument(
        "--config", help="YAML file or the name of a shipped one: digits_lt/reversed (required)"
    )
    parser.add_argument("--print-config", action="store_true", help="print all keys and exit")
    parser.add_argument("--dry-run", action="store_true", help="train one step and write nothing")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="train three steps at the smallest sizes in <output_dir>/smoke/, emptied first; "
        "with --print-config: list the changes",
    )
    add_sweep_flags(parser)
    parser.add_overrides()
    options = parser.parse(arguments)
    if options.config is None:
        raise ConfigError("--config is missing; for example --config digits_lt/reversed")
    single = {"print-config": options.print_config, "dry-run": options.dry_run}
    alone = [flag for flag, given in {**single, "smoke": options.smoke}.items() if given]
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
        changes: list[str] = []
        if wants_sweep(options):
            return _sweep(options)
        if options.smoke:
            world_size = world_size_from_environment()
            config, changes = load_smoke_config(options.config, options.overrides, world_size)
        else:
            config = load_config(options.config, options.overrides)
        if options.print_config:
            if rank == 0:
                print("".join(f"# --smoke: {c}\n" for c in changes) + dump_config(config), end="")
            return DONE
        if not options.smoke:
            refuse_smoke_folder(config)
        return _train(config, dry_run=options.dry_run, smoke=options.smoke)
    except UserError as error:
        # The ranks of a host read the same command line and files, so one of them speaks for all.
        silent = isinstance(error, PeerError) or (isinstance(error, ConfigError) and local_rank)
        if not silent:
            where = f" [rank {rank}]" if many else ""
            show(f"error{where}: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        show(f"error: {error}; check the path, its permissions and free space", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("interrupted; start again to resume from the last checkpoint", file=sys.stderr)
        return INTERRUPTED


def _sweep(options: argparse.Namespace) -> int:
    from simpro_fast.cli.members import print_commands, train_members

    members = members_of([options.config], options.grid, options.seeds, options.overrides)
    act = print_commands if options.print_commands else train_members
    return act(members, launcher_of(options))


def _train(config: Config, *, dry_run: bool, smoke: bool) -> int:
    from simpro_fast.distributed.environment import check_launch
    from simpro_fast.distributed.process_group import start_ranks, stop_ranks
    from simpro_fast.fault_tolerance.exit_code import conclude
    from simpro_fast.fault_tolerance.watchdog import Watchdog
    from simpro_fast.run.banner import announce_launch
    from simpro_fast.run.lock import RunLock
    from simpro_fast.run.loggers.build import check_packages
    from simpro_fast.run.resume import is_finished
    from simpro_fast.training.trainer import Trainer

    check_launch(config)
    check_packages(config)
    ranks = start_ranks(config)
    log_to_terminal(ranks.is_main)
    watchdog = Watchdog(config, ranks, write=not dry_run)
    lock = RunLock(config.run_dir, ranks)
    try:
        announce_launch(config, ranks)
        if not dry_run:
            lock.take()
        if smoke and not dry_run:
            _clear_smoke_run(config, ranks)
        if not dry_run and is_finished(config, ranks):
            return DONE
        watchdog.start()
        with ExitStack() as stack:
            try:
                trainer = Trainer(config, ranks, write=not dry_run, watchdog=watchdog)
                stack.callback(trainer.close)
                if dry_run:
                    trainer.dry_run()
                else:
                    trainer.fit()
            except BaseException as error:
                # While the process group still stands: others may be waiting for this rank in it.
                return conclude(error, watchdog)
        return DONE
    finally:
        stop_ranks()
        watchdog.close()
        lock.release()


def _clear_smoke_run(config: Config, ranks: Ranks) -> None:
    """Empty the run directory; a finished smoke run would else have nothing to do."""
    if ranks.is_main and (left := list(config.run_dir.iterdir())):
        logging.getLogger(__name__).info("%s: emptied for this smoke run", config.run_dir)
        for path in left:  # the folder itself is locked
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    ranks.barrier()
