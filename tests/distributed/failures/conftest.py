"""One unbroken run of two ranks that the broken ones are compared with."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.chaos import chaos_config
from tests.distributed.command_ranks import CommandRanks
from tests.distributed.outcomes import Outcome, outcome


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Forty steps of the tiny configuration to which nothing happens."""
    folder: Path = tmp_path_factory.mktemp("unbroken")
    config = chaos_config(folder, "unbroken", steps=40, every=40)
    ranks = CommandRanks(config, folder)
    assert ranks.wait() == [0, 0], ranks.output()
    return outcome(config)
