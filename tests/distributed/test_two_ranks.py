"""Several gloo ranks: equal state, one world-size-free file, errors that reach every rank."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from simpro_fast.config import Config, parse_config
from simpro_fast.data.loader import build_loader
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError
from tests.distributed.gloo_ranks import run_ranks
from tests.distributed.rank_runs import HalfBrighter, dump, mean_losses, on_ranks, start, train
from tests.equality import assert_close, by_part

MakeConfig = Callable[..., Config]


MEASURED = ("images_per_second", "data_wait_fraction", "peak_memory_mib")


def _run(world_size: int, tree: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """Train and write, so that a run of the same name goes on from there."""
    return on_ranks(world_size, train, tree, steps, build_loader, True)


@pytest.mark.parametrize(
    "forward", [{}, {"train.weak_forward": "no_grad", "train.strong_forward": "confident"}]
)
def test_two_deepspeed_ranks_take_the_same_steps_as_one(
    tiny: MakeConfig, forward: dict[str, str]
) -> None:
    """Synchronised batch norm and identical views: equal up to rounding."""
    exact = {"train.precision": "fp64", "model.activation": "silu"}
    changes = {"distributed.engine": "deepspeed", **exact, **forward}
    tree = {n: dump(tiny({**changes, "name": f"ranks{n}", "evaluate.every": 2})) for n in (1, 2)}
    (one,), two = _run(1, tree[1], 10), _run(2, tree[2], 10)
    for part in ("model", "average", "optimizer"):
        assert_close(two[0][part], one[part], 1e-10)
    assert_close(mean_losses(two), one["losses"], 1e-10)
    rows, of_two = ((parse_config(tree[n]).run_dir / "metrics.jsonl").read_text() for n in (1, 2))
    for row, other in zip(rows.splitlines(), of_two.splitlines(), strict=True):
        expected = {k: v for k, v in json.loads(row).items() if k not in MEASURED}
        found = {k: v for k, v in json.loads(other).items() if k not in MEASURED}
        for key, value in expected.items():
            # A class without anything to count is null on both sides.
            pairs = zip(
                *(v if isinstance(v, list) else [v] for v in (value, found[key])), strict=True
            )
            for wanted, got in pairs:
                assert got == (None if wanted is None else pytest.approx(wanted, rel=1e-9)), key


def test_buffers_are_equal_on_both_ranks_whatever_sync_bn(tiny: MakeConfig) -> None:
    """After a period's end and more steps, with brighter images on rank 1."""
    found = {}
    for sync_bn in (True, "average_buffers", False):
        tree = dump(tiny({"distributed.sync_bn": sync_bn}))
        first, second = on_ranks(2, train, tree, 7, HalfBrighter)
        assert first["equal"] and second["equal"], sync_bn
        assert not torch.equal(first["losses"], second["losses"]), "ranks see different images"
        found[sync_bn] = first["model"]
    for name, averaged in found["average_buffers"].items():
        differs = not torch.equal(averaged, found[False][name])
        # Training never reads the running statistics, so the weights are the same.
        assert differs == ("running" in name), name
    assert not torch.equal(found[True]["head.weight"], found[False]["head.weight"])


def test_stages_are_bit_equal_and_go_on_with_another_number_of_ranks(tiny: MakeConfig) -> None:
    """Saved by two ranks at any stage, read by one without ZeRO, and back."""
    greedy = {"method.name": "tests.methods.toy_methods.Greedy", "method.branches": 0}
    changes = {"distributed.engine": "deepspeed", "optim.lr": 0.01, **greedy}
    further = on_ranks(2, train, dump(tiny(changes)), 8)[0]
    stage_0 = None
    for stage in (0, 1, 2):
        named = {**changes, "name": f"stage{stage}"}
        tree = dump(tiny({**named, "distributed.zero_stage": stage}))
        two = _run(2, tree, 7)
        state = read_checkpoint(list_checkpoints(parse_config(tree).run_dir / "checkpoints")[0])
        assert state["step"] == 7
        saved = by_part(state)
        weights = [n for n in saved["model"] if "running" not in n and "batches" not in n]
        assert "method_parameters.scale" in weights
        assert sorted(saved["optimizer"]) == sorted(f"momentum_buffer/{name}" for name in weights)
        for name, momentum in saved["optimizer"].items():
            assert momentum.abs().sum() > 0, name
        stage_0 = stage_0 or saved
        (alone,) = _run(1, dump(tiny(named)), 0)
        assert alone["start"] == 7
        for part in ("model", "average", "optimizer"):
            assert_close(saved[part], stage_0[part], 0.0)
            assert_close(saved[part], two[0][part], 0.0)
            assert_close(alone[part], saved[part], 0.0)
        for name, counts in saved["per_rank"].items():
            assert torch.equal(alone["per_rank"][name][0], counts.sum(0)), name
        # And the other way round: what one rank saved, two ranks continue.
        more = _run(2, tree, 1)
        assert more[0]["start"] == 7
        assert_close(more[0]["model"], further["model"], 0.0)


def test_counts_of_the_unfinished_period_are_not_lost(tiny: MakeConfig) -> None:
    """Two ranks, saved at step 7 of periods of 5, go on past the update at 10."""
    changes = {"train.precision": "fp64", "model.activation": "silu"}
    expected = on_ranks(2, train, dump(tiny(changes)), 11)[0]
    for ranks_after in (1, 2, 4):
        tree = dump(tiny({**changes, "name": f"then{ranks_after}"}))
        _run(2, tree, 7)
        found = _run(ranks_after, tree, 4)[0]
        assert found["start"] == 7
        tolerance = 0.0 if ranks_after == 2 else 1e-10
        for key in ("model", "method"):
            assert_close(found[key], expected[key], tolerance)
        for name in ("method/labeled_count", "method/unlabeled_mass"):
            counts, wanted = found["per_rank"][name].sum(0), expected["per_rank"][name].sum(0)
            assert_close(counts, wanted, 1e-10)


def _fit(
    rank: int, world_size: int, tree: dict[str, Any], bad_rank: int | None = None
) -> dict[str, Any]:
    config = parse_config(tree)
    trainer = Trainer(config, start(config, rank, world_size))
    if rank == bad_rank:
        trainer.algorithm.method.alpha = math.nan
    try:
        summary = trainer.fit()
        evaluation = trainer.last_evaluation
        tested = int(evaluation.count.sum()) if evaluation else 0
        return {"error": "", "top1": summary["top1"], "tested": tested}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        trainer.close()


def test_a_bad_loss_on_one_rank_stops_both(tiny: MakeConfig) -> None:
    first, second = run_ranks(_fit, dump(tiny()), 1)
    for result in (first, second):
        assert "NonFiniteLossError" in result["error"]
    assert first["error"].split(";")[0] == second["error"].split(";")[0]


def test_a_run_that_explodes_is_stopped_on_both(tiny: MakeConfig) -> None:
    """By its loss, or by running statistics beyond float32, before anything is saved."""
    tree = dump(tiny({"optim.lr": 1e6, "optim.grad_clip": None}))
    first, second = run_ranks(_fit, tree)
    assert "is not finite" in first["error"]
    assert first["error"] == second["error"]


def test_evaluation_counts_every_image_once(tiny: MakeConfig) -> None:
    """90 test images on 4 ranks: 22 or 23 each, one result everywhere."""
    results = run_ranks(_fit, dump(tiny({"data.test_per_class": 9})), world_size=4)
    assert results[0]["tested"] == 90 and results[0]["error"] == ""
    assert all(result == results[0] for result in results)


def _disagree(rank: int, world_size: int, tree: dict[str, Any]) -> str:
    config = parse_config({**tree, "seed": 1 + rank})
    try:
        Trainer(config, start(config, rank, world_size))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_configurations_are_refused(tiny: MakeConfig) -> None:
    """Before the first step, on every rank, with both values."""
    for message in run_ranks(_disagree, dump(tiny())):
        assert "rank 1 on " in message
        assert "seed 2 against 1" in message
