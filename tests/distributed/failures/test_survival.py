"""Killed at any moment, resumed by any number of ranks: nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from simpro_fast.config import Config, parse_config
from simpro_fast.data.loader import build_loader
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.trainer import Trainer
from tests.distributed.chaos import chaos_config, kill_repeatedly
from tests.distributed.command_ranks import CommandRanks
from tests.distributed.outcomes import Outcome, outcome
from tests.distributed.rank_runs import dump, on_ranks, start, train
from tests.equality import assert_close, by_part

MakeConfig = Callable[..., Config]


def test_two_kills_of_two_ranks_change_nothing(tmp_path: Path, unbroken: Outcome) -> None:
    """With the newest checkpoint damaged once."""
    config = chaos_config(tmp_path, "killed", steps=40, every=1)
    kill_repeatedly(config, tmp_path / "starts", 2, seed=5, damage=(1,))
    unbroken.assert_equal(outcome(config))


@pytest.mark.slow
def test_twenty_kills_of_two_ranks_change_nothing(tmp_path: Path) -> None:
    unbroken = chaos_config(tmp_path, "unbroken", steps=84, every=84)
    ranks = CommandRanks(unbroken, tmp_path / "unbroken")
    assert ranks.wait() == [0, 0], ranks.output()
    config = chaos_config(tmp_path, "killed", steps=84, every=1)
    kill_repeatedly(config, tmp_path / "starts", 20, seed=1, damage=(3, 10, 19))
    outcome(unbroken).assert_equal(outcome(config))


def _resumed(rank: int, world_size: int, tree: dict[str, Any]) -> dict[str, Any]:
    """What a run has after its start, and its next batch."""
    config = parse_config(tree)
    trainer = Trainer(config, start(config, rank, world_size))
    state = {"step": trainer.step, **by_part(trainer.checkpoints.state_dict(trainer.state))}
    views = trainer.loader.next(trainer.step).views
    trainer.close()
    return {"views": _digests(views), **state}


def _digests(views: torch.Tensor) -> list[str]:
    return [sha256(view.contiguous().numpy().tobytes()).hexdigest() for view in views]


def _unbroken_views(config: Config, step: int) -> list[str]:
    trainer = Trainer(config, start(config, 0, 1), write=False)
    for earlier in range(step):
        trainer.loader.next(earlier)
    views = trainer.loader.next(step).views
    trainer.close()
    return sorted(_digests(views))


@pytest.mark.parametrize(
    "goes_on",
    [
        pytest.param([(4, 2)], id="four", marks=pytest.mark.slow),
        pytest.param([(4, 1), (4, 0), (1, 2)], id="other_stages", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_ranks_goes_on_at_every_stage(
    tiny: MakeConfig, goes_on: list[tuple[int, int]]
) -> None:
    """Saved by two ranks within a period: weights, EMA, optimizer, priors, counts, step
    and the next views are the saved ones on one and on four."""
    changes = {"distributed.engine": "deepspeed", "distributed.zero_stage": 1}
    config = tiny(changes)
    on_ranks(2, train, dump(config), 7, build_loader, True)
    state = read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0])
    saved = by_part(state)
    views = _unbroken_views(tiny(), 7)
    for world_size, stage in goes_on:
        tree = dump(tiny({**changes, "distributed.zero_stage": stage}))
        ranks = on_ranks(world_size, _resumed, tree)
        assert sorted(view for rank in ranks for view in rank["views"]) == views
        for rank in ranks:
            assert rank["step"] == state["step"] == 7
            assert rank["history"]["top1"].tolist() == saved["history"]["top1"].tolist()
            for part in ("model", "average", "optimizer"):
                assert_close(rank[part], saved[part], 0.0)
            for prior in ("pi_u", "phi"):
                assert torch.equal(rank["method"][prior], saved["method"][prior])
            for name, counts in saved["per_rank"].items():
                assert torch.equal(rank["per_rank"][name].sum(0), counts.sum(0)), name
