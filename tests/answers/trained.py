"""A tiny run, trained once for all tests of a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from simpro_fast.config import parse_config
from simpro_fast.config.schema import Config
from simpro_fast.distributed.process_group import start_ranks, stop_ranks
from simpro_fast.training.trainer import Trainer
from tests.conftest import TINY


def train(folder: Path, **sections: Any) -> Config:
    """Train the tiny configuration below `folder`; its run is `config.run_dir`.

    Args:
        sections: in place of TINY's.
    """
    config = parse_config({**TINY, **sections, "output_dir": str(folder / "runs")})
    trainer = Trainer(config, start_ranks(config))
    try:
        trainer.fit()
    finally:
        trainer.close()
        stop_ranks()
    return config
