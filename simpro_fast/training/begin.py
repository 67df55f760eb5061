"""Files that a run writes when it starts or resumes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from simpro_fast.config import Config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split, save_split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.models import PretrainedReport
from simpro_fast.run.directory import RunDirectory
from simpro_fast.run.loggers import Loggers, start_loggers


def begin_run(
    run: RunDirectory,
    config: Config,
    ranks: Ranks,
    facts: dict[str, Any],
    *,
    split: Split,
    dataset: ArrayDataset,
    pretrained: PretrainedReport | None,
    checkpoint: Path | None,
    step: int,
    unfinished: bool,
) -> Loggers:
    """Fill the run directory on rank 0 and start its loggers; the others wait, and have none.

    Args:
        facts: for environment.json, besides versions and machine.
        pretrained: what `model.weights` filled.
        checkpoint: from which the run goes on, after `step` steps; None: it is a fresh one.
        unfinished: the row of metrics of that step is still to be written.
    """
    loggers = Loggers()
    if ranks.is_main:
        if checkpoint is None:
            run.start(config, ranks, facts, None if pretrained is None else asdict(pretrained))
        else:
            run.go_on(config, ranks, facts, checkpoint, step, unfinished=unfinished)
        save_split(split, run.path, dataset)
        fresh = checkpoint is None
        loggers = start_loggers(
            config, run.path, dataset.class_names, step - unfinished, fresh=fresh
        )
    ranks.barrier()
    return loggers
