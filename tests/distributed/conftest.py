"""One unbroken run of two ranks that the broken ones are compared with."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from simpro_fast.config import Config, parse_config
from simpro_fast.training.checkpoint import list_checkpoints, read_checkpoint
from tests.conftest import TINY
from tests.distributed.command_ranks import CommandRanks

# What depends on the clock, the place or the number of processes that worked on a run.
NOT_COMPARED = ("seconds", "config")
NOT_COMPARED_METRICS = ("images_per_second", "data_wait_fraction", "peak_memory_mib")


@dataclass
class Outcome:
    """What a finished run has learnt and logged."""

    state: dict[str, Any]
    metrics: list[dict[str, Any]]

    def assert_equal(self, other: Outcome) -> None:
        """Bit for bit, without clocks."""
        for key in self.state.keys() | other.state.keys():
            _assert_equal(self.state[key], other.state[key], key)
        assert self.metrics == other.metrics


def outcome(config: Config) -> Outcome:
    state = read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0])
    rows = [json.loads(r) for r in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        {k: v for k, v in state.items() if k not in NOT_COMPARED},
        [{k: v for k, v in row.items() if k not in NOT_COMPARED_METRICS} for row in rows],
    )


@pytest.fixture
def long_run(tiny: Callable[..., Config]) -> Config:
    """Forty steps of two ranks, saved after every one: long enough to be broken somewhere."""
    return tiny({"train.steps": 40, "checkpoint.every": 1})


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """How `long_run` ends if nothing happens to it."""
    folder: Path = tmp_path_factory.mktemp("unbroken")
    tree = {**TINY, "output_dir": str(folder / "runs"), "checkpoint": {"every": 40}}
    config = parse_config({**tree, "train": {**TINY["train"], "steps": 40}})
    ranks = CommandRanks(config, folder)
    assert ranks.wait() == [0, 0], ranks.output()
    return outcome(config)


def _assert_equal(a: Any, b: Any, where: str) -> None:
    if isinstance(a, torch.Tensor):
        assert a.dtype == b.dtype and torch.equal(a, b), where
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            _assert_equal(a[key], b[key], f"{where}.{key}")
    else:
        assert a == b, where
