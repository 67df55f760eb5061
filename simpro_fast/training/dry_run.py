"""Whether a run would start, and how long it would take: a few steps, and nothing is written."""

from __future__ import annotations

import logging
import math
import time

import torch

from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.resume import find_state
from simpro_fast.training.step_graph import WARM_UP
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.progress import clock

logger = logging.getLogger(__name__)

SECONDS = 2.0
MOST = 50
"""Steps that are timed: as many as take about `SECONDS`, at least one and at most so many."""


def dry_run(trainer: Trainer) -> None:
    """Train some steps and say what they gave and took.

    What a start refuses is refused here too: a run directory with the checkpoint of another run.
    All ranks call it together.
    """
    config, ranks = trainer.setup.config, trainer.setup.ranks
    find_state(config, trainer.run, trainer.checkpoints.fingerprint, ranks)
    trainer.announce()
    started = time.perf_counter()
    trainer.train_step()
    averages = trainer.meter.finish(ranks)  # read from the device, so the step is over
    first = time.perf_counter() - started
    seconds = seconds_per_step(trainer)
    period = config.train.period * config.evaluate.every
    tests = math.ceil(config.train.steps / period) if len(trainer.setup.split.test) else 0
    shown = ", ".join(f"{k} {v:.4f}" for k, v in averages.items() if isinstance(v, float))
    logger.info("dry run, first step: %s; nothing was written", shown)
    logger.info(
        "%.3g s/step (the first took %.3g s): %d steps take about %s%s",
        seconds,
        first,
        config.train.steps,
        clock(config.train.steps * seconds),
        f", besides {tests} evaluation(s)" if tests else "",
    )


def seconds_per_step(trainer: Trainer) -> float:
    """Mean seconds of a step, after those that compile, capture and fill the pipeline's queue.

    All ranks call it together; they train the same number of steps, and each has its own result.
    """
    ranks = trainer.setup.ranks
    for _ in range(0 if trainer.step_graph is None else WARM_UP + 1):
        trainer.train_step()
    one = _seconds(trainer, 1)
    wished = math.ceil(SECONDS / max(one, 1e-6))
    agreed = int(ranks.gather_bytes(str(wished).encode())[0])
    return _seconds(trainer, min(agreed, MOST))


def _seconds(trainer: Trainer, steps: int) -> float:
    _finish(trainer.setup.ranks)
    started = time.perf_counter()
    for _ in range(steps):
        trainer.train_step()
    _finish(trainer.setup.ranks)
    return (time.perf_counter() - started) / steps


def _finish(ranks: Ranks) -> None:
    """Wait for the device, which runs behind the host."""
    if ranks.device.type == "cuda":
        torch.cuda.synchronize(ranks.device)
