"""One rank, two or four: the same curve, priors and counts (cases 20 and 33)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simpro_fast.config import Config
from tests.distributed.rank_runs import (
    HalfBrighter,
    assert_close,
    curves,
    dump,
    mean_losses,
    on_ranks,
)

MakeConfig = Callable[..., Config]

# The smallest batch that four ranks share, since ResNet-50 is slow here.
REAL_NETS = {
    "data.batch_size": 4,
    "data.mu": 1,
    "data.strong_views": 1,
    "data.labeled_views": 1,
    "method.threshold": 0.12,  # passes some of the images of a fresh network
    "optim.lr": 0.001,  # these batches are too small for more
}


def _assert_same_run(found: list[dict[str, Any]], one: dict[str, Any], tolerance: float) -> None:
    assert_close(mean_losses(found), one["losses"], tolerance)
    for key in ("priors", "kl"):
        assert_close(found[0][key], one[key], tolerance)
    assert all(rank["equal"] for rank in found)


def test_fifty_steps_on_one_two_and_four_ranks(tiny: MakeConfig) -> None:
    """fp32, smooth activation, brighter images on the last ranks, five updates of the priors."""
    changes = {"model.activation": "silu", "optim.lr": 0.02, "train.steps": 100, "train.period": 10}
    tree = dump(tiny(changes))
    (one,) = on_ranks(1, curves, tree, 50, HalfBrighter)
    assert one["losses"].isfinite().all() and one["kl"][-1] != one["kl"][0]
    for world_size in (2, 4):
        found = on_ranks(world_size, curves, tree, 50, HalfBrighter)
        assert (found[0]["losses"] - found[-1]["losses"]).abs().max() > 0.01
        _assert_same_run(found, one, 1e-5)


@pytest.mark.parametrize(
    ("model", "engine", "worlds"),
    [
        ("wrn_28_2", "plain", {"fp64": (2, 4), "fp32": (2, 4)}),
    ],
)
def test_real_nets(
    tiny: MakeConfig, model: str, engine: str, worlds: dict[str, tuple[int, ...]]
) -> None:
    """float64: three steps with an update of the priors; fp32: two, before kinks flip."""
    changes = {"model.name": model, "distributed.engine": engine, "train.period": 2}
    for precision, steps, tolerance in (("fp64", 3, 1e-10), ("fp32", 2, 1e-5)):
        tree = dump(tiny({**REAL_NETS, **changes, "train.precision": precision}))
        (one,) = on_ranks(1, curves, tree, steps, HalfBrighter)
        assert one["losses"].isfinite().all() and one["priors"][0, 3].sum() > 0
        for world_size in worlds[precision]:
            found = on_ranks(world_size, curves, tree, steps, HalfBrighter)
            _assert_same_run(found, one, tolerance)
