"""What a finished run has learnt and logged, to be compared with another one."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from simpro_fast.config import Config
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from tests.equality import assert_bit_equal, without_clock

# What depends on the clock, the place or the number of processes that worked on a run.
NOT_COMPARED_METRICS = ("images_per_second", "data_wait_fraction", "peak_memory_mib")


@dataclass
class Outcome:
    """What a finished run has learnt and logged."""

    state: dict[str, Any]
    metrics: list[dict[str, Any]]

    def assert_equal(self, other: Outcome) -> None:
        """Bit for bit, without clocks."""
        for key in self.state.keys() | other.state.keys():
            assert_bit_equal(self.state[key], other.state[key], key)
        assert self.metrics == other.metrics


def outcome(config: Config) -> Outcome:
    state = read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0])
    rows = [json.loads(r) for r in (config.run_dir / "metrics.jsonl").read_text().splitlines()]
    return Outcome(
        without_clock(state),
        [{k: v for k, v in row.items() if k not in NOT_COMPARED_METRICS} for row in rows],
    )
