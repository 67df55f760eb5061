"""Killed at any moment, resumed by any number of ranks: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from simpro_fast.config import Config
from tests.distributed.chaos import chaos_config, kill_repeatedly
from tests.distributed.command_ranks import CommandRanks
from tests.distributed.outcomes import Outcome, outcome

MakeConfig = Callable[..., Config]


def test_five_kills_of_two_ranks_change_nothing(tmp_path: Path, unbroken: Outcome) -> None:
    """Cases 24, 26 and 28, with the newest checkpoint damaged once."""
    config = chaos_config(tmp_path, "killed", steps=40, every=1)
    kills = kill_repeatedly(config, tmp_path / "starts", 5, seed=5, damage=(4,))
    assert len(kills) == 5
    unbroken.assert_equal(outcome(config))


@pytest.mark.slow
def test_twenty_kills_of_two_ranks_change_nothing(tmp_path: Path) -> None:
    unbroken = chaos_config(tmp_path, "unbroken", steps=84, every=84)
    ranks = CommandRanks(unbroken, tmp_path / "unbroken")
    assert ranks.wait() == [0, 0], ranks.output()
    config = chaos_config(tmp_path, "killed", steps=84, every=1)
    kill_repeatedly(config, tmp_path / "starts", 20, seed=1, damage=(3, 10, 19))
    outcome(unbroken).assert_equal(outcome(config))
