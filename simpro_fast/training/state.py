"""Everything that a run must not lose: collected for a checkpoint, put back when a run goes on."""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from simpro_fast.data.splits.split import save_split
from simpro_fast.errors import ConfigError
from simpro_fast.run.checkpoint import find_checkpoint
from simpro_fast.run.resume import check_same_run
from simpro_fast.run.tensorboard import TensorBoardLog

if TYPE_CHECKING:
    from simpro_fast.training.trainer import Trainer

logger = logging.getLogger(__name__)


@dataclass
class History:
    """What a run remembers of its evaluations, part of every checkpoint."""

    top1: list[float]
    """Of every evaluation so far, percent; the last 20 make `top1_mean_last20`."""
    seconds: float
    """Wall time of all processes that worked on this run."""


def collect_state(trainer: Trainer) -> dict[str, Any]:
    """Everything that training depends on, as tensors and plain types, equal on all ranks.

    Every rank calls it, since rank-local state is gathered.
    """
    return {
        "step": trainer.step,
        **trainer.engine.save(),
        "ema": trainer.ema.state_dict(),
        "method": trainer.method.state_dict(),
        "accumulators": trainer.ranks.gather(torch.cat(_accumulators(trainer))),
        "top1": trainer.history.top1,
        "seconds": trainer.history.seconds,
        "fingerprint": trainer.fingerprint,
        "config": trainer.config.model_dump(mode="json"),
    }


def restore_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Put back what `collect_state` gave, whatever the number of ranks was then."""
    trainer.engine.load({"model": state["model"], "optimizer": state["optimizer"]})
    trainer.ema.load_state_dict(state["ema"])
    trainer.method.load_state_dict(state["method"])
    # Each rank goes on with its own counts; among another number of ranks, rank 0 with all.
    ranks = trainer.ranks
    counts = state["accumulators"].to(ranks.device)
    if len(counts) == ranks.world_size:
        mine = counts[ranks.rank]
    else:
        mine = counts.sum(0) * (ranks.rank == 0)
    accumulators = _accumulators(trainer)
    for target, saved in zip(accumulators, mine.split([len(a) for a in accumulators]), strict=True):
        target.copy_(saved)
    trainer.fingerprint = dict(state["fingerprint"])
    trainer.step = state["step"]
    trainer.history = History(list(state["top1"]), state["seconds"])


def _accumulators(trainer: Trainer) -> list[Tensor]:
    """What this rank has counted since the last update of the priors, float64 vectors."""
    return [trainer.method.labeled_count, trainer.method.unlabeled_mass, trainer.meter.sums]


def find_state(trainer: Trainer) -> tuple[Path, dict[str, Any]] | None:
    """The checkpoint that `checkpoint.resume` means, for `restore_state`; None for a fresh start.

    Raises:
        ConfigError: `none` and the run is not empty, or another configuration was trained.
        UserError: no usable checkpoint where one is asked for, or one of other data or weights.
    """
    wanted = trainer.config.checkpoint.resume
    if wanted == "none":
        if not trainer.run.is_empty():
            raise ConfigError(
                f"checkpoint.resume=none, but {trainer.run.path} is not empty; "
                "choose another name or output_dir, or resume=auto to go on"
            )
        return None
    found = find_checkpoint(wanted, trainer.run.checkpoints)
    if found is not None:
        check_same_run(*found, trainer.config, trainer.fingerprint)
    # Before anything is built: ranks that start differently would wait for each other for ever.
    trainer.ranks.agree_on({"step to resume from": str(found[1]["step"] if found else 0)})
    return found


def start_run(trainer: Trainer, resumed_from: Path | None) -> None:
    """Write what a run starts with. Everything that can be refused has been by now."""
    if trainer.ranks.is_main:
        run, config = trainer.run, trainer.config
        if resumed_from is None:
            logger.info("no checkpoint in %s: starting fresh", run.checkpoints)
        else:
            logger.info("resumed from %s at step %d", resumed_from, trainer.step)
        run.start(config, trainer.ranks, {"alpha": trainer.alpha, **trainer.fingerprint})
        if resumed_from is None:
            run.write_weights(None if trainer.pretrained is None else asdict(trainer.pretrained))
        save_split(trainer.split, run.path, trainer.dataset)
        folder = None if resumed_from is None else resumed_from.resolve().parent
        own = folder == run.checkpoints.resolve()  # another run's rows never were here
        if own and trainer.step >= config.train.period and not run.metrics.is_file():
            logger.warning(
                "%s is missing: its rows up to step %d are lost, it begins anew after that",
                run.metrics,
                trainer.step,
            )
        run.cut(trainer.step)
        if config.log.tensorboard:
            trainer.board = TensorBoardLog(run.path, purge_step=trainer.step)
    trainer.ranks.barrier()
