"""One rank, two or four: the same curve, priors and counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simpro_fast.config import Config
from tests.distributed.rank_runs import HalfBrighter, curves, dump, mean_losses, on_ranks
from tests.equality import assert_close

MakeConfig = Callable[..., Config]

# The smallest batch that four ranks share.
REAL_NETS = {
    "data.batch_size": 4,
    "data.mu": 1,
    "data.strong_views": 1,
    "data.labeled_views": 1,
    "method.threshold": 0.12,  # passes some of the images of a fresh network
    "optim.lr": 0.001,  # these batches are too small for more
    "evaluate.every": 100,
}


def slow(*values: Any) -> Any:
    """A parameter set that a faster one stands for in `make test`."""
    return pytest.param(*values, marks=pytest.mark.slow)


def _assert_same_run(found: list[dict[str, Any]], one: dict[str, Any]) -> None:
    assert_close(mean_losses(found), one["losses"], 1e-10)
    for key in ("priors", "kl"):
        assert_close(found[0][key], one[key], 1e-10)
    assert all(rank["equal"] for rank in found)


@pytest.mark.parametrize(("steps", "world_sizes"), [(20, (2,)), slow(50, (2, 4))])
def test_many_steps(tiny: MakeConfig, steps: int, world_sizes: tuple[int, ...]) -> None:
    """Brighter images on the last ranks, five updates of the priors."""
    changes = {"train.precision": "fp64", "model.activation": "silu", "optim.lr": 0.02}
    tree = dump(tiny({**changes, "train.steps": 100, "train.period": steps // 5}))
    (one,) = on_ranks(1, curves, tree, steps, HalfBrighter)
    assert one["losses"].isfinite().all() and one["kl"][-1] != one["kl"][0]
    for world_size in world_sizes:
        found = on_ranks(world_size, curves, tree, steps, HalfBrighter)
        assert (found[0]["losses"] - found[-1]["losses"]).abs().max() > 0.01
        _assert_same_run(found, one)


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_wide_resnet(tiny: MakeConfig, world_size: int) -> None:
    """Three steps with an update of the priors."""
    changes = {"model.name": "wrn_28_2", "train.period": 2, "train.precision": "fp64"}
    tree = dump(tiny({**REAL_NETS, **changes}))
    (one,) = on_ranks(1, curves, tree, 3, HalfBrighter)
    assert one["losses"].isfinite().all() and one["priors"][0, 3].sum() > 0
    _assert_same_run(on_ranks(world_size, curves, tree, 3, HalfBrighter), one)


@pytest.mark.parametrize(("batch", "steps", "world_size"), [slow(4, 1, 2), slow(8, 2, 4)])
def test_resnet50_through_deepspeed(
    tiny: MakeConfig, batch: int, steps: int, world_size: int
) -> None:
    """With an update of the priors after each step."""
    changes = {**REAL_NETS, "model.name": "resnet50", "distributed.engine": "deepspeed"}
    more = {"train.period": 1, "train.precision": "fp64", "data.batch_size": batch}
    tree = dump(tiny({**changes, **more}))
    (one,) = on_ranks(1, curves, tree, steps, HalfBrighter)
    _assert_same_run(on_ranks(world_size, curves, tree, steps, HalfBrighter), one)
