"""One start of a training: what the command and `simpro_fast.train` share."""

from __future__ import annotations

from contextlib import ExitStack

import torch.distributed as dist

from simpro_fast.config import Config
from simpro_fast.distributed.failures import conclude
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.distributed.stop_requests import StopRequests
from simpro_fast.run.lock import RunLock
from simpro_fast.training.banner import announce_launch
from simpro_fast.training.dry_run import dry_run as try_steps
from simpro_fast.training.resume import is_finished
from simpro_fast.training.setup import check_config
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.logs import log_to_terminal


def run_training(config: Config, *, dry_run: bool = False, guest: bool = False) -> int:
    """Train to `train.steps`, from the newest checkpoint; a finished run is left as it is.

    Args:
        dry_run: some steps, nothing is written.
        guest: the process is another program's, such as a notebook's: its signals are left alone,
            nothing ends the process, and what goes wrong is raised.

    Returns:
        the exit code of the command; 0 for a guest.

    Raises:
        UserError: the launch cannot work, or the run directory is in use; a guest gets all errors.
    """
    check_config(config)
    joined = dist.is_initialized()
    ranks = start_ranks(config)
    log_to_terminal(ranks.is_main)
    requests = StopRequests()
    lock = RunLock(config.run_dir, ranks)
    try:
        announce_launch(config, ranks)
        if dry_run:
            lock.probe()
        else:
            lock.take()
        if is_finished(config, ranks) and not dry_run:
            return 0
        with ExitStack() as stack:
            try:
                trainer = Trainer(config, ranks, write=not dry_run, requests=requests)
                stack.callback(trainer.close)
                if dry_run:
                    try_steps(trainer)
                else:
                    if not guest:  # before there is something to save, a signal ends at once
                        requests.install()
                    trainer.fit()
            except BaseException as error:
                if guest:
                    raise
                return conclude(error, ranks, requests)
        return 0
    finally:
        if not joined:
            stop_ranks()
        requests.remove()
        lock.release()
