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
from simpro_fast.config import Config, dump_config, load_config, load_smoke_config
from simpro_fast.config.smoke import FOLDER as SMOKE_FOLDER
from simpro_fast.errors import ConfigError, PeerError, UserError
from simpro_fast.printable import show
from simpro_fast.utils.logs import log_to_terminal

if TYPE_CHECKING:
    from simpro_fast.distributed.process_group import Ranks

DONE, FAILED, INTERRUPTED = 0, 1, 130

# Given to the script they would silently start something smaller than was asked for.
LAUNCHER_FLAGS = {
    *("--hostfile", "--num-gpus", "--num-nodes", "--include", "--exclude", "--no-ssh"),
    *("--node-rank", "--nnodes", "--nproc-per-node", "--master-addr", "--master-port"),
}
# What other programs call it; here it is a key, and needs nothing said.
RESUME_FLAGS = {"--resume", "--continue", "--restart", "--resume-from", "--resume_from"}


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
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="train some steps, say how long the run takes, and write nothing",
    )
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="train three steps at the smallest sizes in <output_dir>/smoke/, emptied first; "
        "with --print-config: list the changes",
    )
    parser.add_overrides()
    options = parser.parse(arguments, _hint)
    if options.config is None:
        raise ConfigError("--config is missing; for example --config digits_lt/reversed")
    return options


def _hint(argument: str) -> str | None:
    """What users of other programs mean by a flag that we lack."""
    flag = argument.partition("=")[0]
    if flag.replace("_", "-") in LAUNCHER_FLAGS:
        return "; it is the launcher's, and belongs before launch/train.py"
    if flag in RESUME_FLAGS:
        return (
            "; the same command goes on by itself from the newest checkpoint, "
            "see checkpoint.resume=auto|none|PATH"
        )
    if "=" in argument:
        return f"; configuration keys have no dashes: {argument.lstrip('-')}"
    return None


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
        if options.smoke:
            world_size = world_size_from_environment()
            config, changes = load_smoke_config(options.config, options.overrides, world_size)
        else:
            config = load_config(options.config, options.overrides)
        if options.print_config:
            if rank == 0:
                print("".join(f"# --smoke: {c}\n" for c in changes) + dump_config(config), end="")
            return DONE
        if not options.smoke and config.name.split("/")[0] == SMOKE_FOLDER:
            raise ConfigError(
                f"name={config.name}: folders below {SMOKE_FOLDER}/ are emptied by --smoke; "
                "choose another name, or add --smoke"
            )
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


def _train(config: Config, *, dry_run: bool, smoke: bool) -> int:
    from simpro_fast.distributed.environment import check_launch
    from simpro_fast.distributed.process_group import start_ranks, stop_ranks
    from simpro_fast.fault_tolerance.exit_code import conclude
    from simpro_fast.fault_tolerance.watchdog import Watchdog
    from simpro_fast.run.banner import announce_launch
    from simpro_fast.run.export import check_report_packages
    from simpro_fast.run.lock import RunLock
    from simpro_fast.run.resume import is_finished
    from simpro_fast.training.dry_run import dry_run as try_steps
    from simpro_fast.training.trainer import Trainer

    check_launch(config)
    check_report_packages(config)
    ranks = start_ranks(config)
    log_to_terminal(ranks.is_main)
    watchdog = Watchdog(config, ranks, write=not dry_run)
    lock = RunLock(config.run_dir, ranks)
    try:
        announce_launch(config, ranks)
        if dry_run:
            lock.probe()
        else:
            lock.take()
            if smoke:
                _clear_smoke_run(config, ranks)
        # What a smoke run finds there it empties, so its dry run does not look.
        finished = not (dry_run and smoke) and is_finished(config, ranks)
        if finished and not dry_run:
            return DONE
        watchdog.start()
        with ExitStack() as stack:
            try:
                trainer = Trainer(config, ranks, write=not dry_run, watchdog=watchdog)
                stack.callback(trainer.close)
                if dry_run:
                    try_steps(trainer, fresh=smoke)
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
