"""Two gloo ranks against one: same views, same steps, same state, one world-size-free file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from simpro_fast.config import Config, parse_config
from simpro_fast.errors import ConfigError
from simpro_fast.training.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.ranks import Ranks, start_ranks
from simpro_fast.training.state import collect_state
from simpro_fast.training.trainer import Trainer
from tests.training.gloo_ranks import run_ranks

MakeConfig = Callable[..., Config]


def _ranks(config: Config, rank: int, world_size: int) -> Ranks:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    return start_ranks(config)


def _train(rank: int, world_size: int, tree: dict[str, Any], steps: int) -> dict[str, Any]:
    """Losses of `steps` steps and the state after them; a checkpoint where `tree` says so."""
    config = parse_config(tree)
    trainer = Trainer(config, _ranks(config, rank, world_size))
    losses = []
    start = trainer.step
    for _ in range(steps):
        trainer.train_step()
        losses.append(trainer.meter.sums[0].item())
        if trainer.step % config.train.period == 0:
            trainer._finish_period(last=False)
    trainer.save()
    state = collect_state(trainer)
    trainer.close()
    return {"start": start, "losses": losses, **state}


def _fit(rank: int, world_size: int, tree: dict[str, Any]) -> dict[str, Any]:
    config = parse_config(tree)
    trainer = Trainer(config, _ranks(config, rank, world_size))
    try:
        return {"error": "", "top1": trainer.fit()["top1"]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    finally:
        trainer.close()


def _one_rank(tree: dict[str, Any], steps: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    results: list[dict[str, Any]] = run_ranks(_train, folder, tree, steps, world_size=1)
    return results[0]


def _dump(config: Config) -> dict[str, Any]:
    return config.model_dump(mode="json")


def _close(a: Any, b: Any, tolerance: float) -> None:
    if isinstance(a, torch.Tensor):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=tolerance)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _close(a[key], b[key], tolerance)


CONFIDENT = {"train.weak_forward": "no_grad", "train.strong_forward": "confident"}


@pytest.mark.parametrize(
    ("engine", "forward"), [("plain", {}), ("deepspeed", {}), ("deepspeed", CONFIDENT)]
)
def test_two_ranks_take_the_same_steps_as_one(
    tiny: MakeConfig, tmp_path: Path, engine: str, forward: dict[str, str]
) -> None:
    """Synchronised batch norm and identical views: equal up to rounding (cases 20 and 33)."""
    changes = {"distributed.engine": engine, "model.activation": "silu", **forward}
    changes["train.period"] = 12  # the sums of the losses run over all ten steps
    one = _one_rank(_dump(tiny({**changes, "name": "one"})), 10, tmp_path / "x")
    two = run_ranks(_train, tmp_path, _dump(tiny({**changes, "name": "two"})), 10)
    mean = [(a + b) / 2 for a, b in zip(two[0]["losses"], two[1]["losses"], strict=True)]
    assert mean == pytest.approx(one["losses"], rel=1e-5)
    for part in ("model", "ema", "optimizer"):
        _close(two[0][part], one[part], 1e-4)
    _close(two[0]["accumulators"].sum(0)[:20], one["accumulators"].sum(0)[:20], 1e-3)


@pytest.mark.parametrize("sync_bn", [True, "average_buffers"])
def test_state_is_bit_equal_on_both_ranks(
    tiny: MakeConfig, tmp_path: Path, sync_bn: bool | str
) -> None:
    """After a period's end and more steps: buffers, weights, priors (case 20)."""
    tree = _dump(tiny({"distributed.sync_bn": sync_bn}))
    first, second = run_ranks(_train, tmp_path, tree, 7)
    for part in ("model", "ema"):
        for key, value in first[part].items():
            assert torch.equal(value, second[part][key]), (part, key)
    for key in ("pi_u", "phi"):
        assert torch.equal(first["method"][key], second["method"][key])
    assert first["losses"] != second["losses"], "the ranks see different images"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_any_stage_goes_on_with_another_number_of_ranks(
    tiny: MakeConfig, tmp_path: Path, stage: int
) -> None:
    """Saved by two ranks at one stage, read by one rank without ZeRO (case 25)."""
    changes = {"distributed.engine": "deepspeed", "model.activation": "silu"}
    tree = _dump(tiny({**changes, "distributed.zero_stage": stage}))
    two = run_ranks(_train, tmp_path, tree, 7)
    config = parse_config(tree)
    saved = read_checkpoint(list_checkpoints(config.run_dir / "checkpoints")[0])
    assert saved["step"] == 7
    weights = [n for n in saved["model"] if n.endswith(("weight", "bias"))]
    assert sorted(saved["optimizer"]) == sorted(weights)
    for name in weights:
        assert saved["optimizer"][name]["momentum_buffer"].abs().sum() > 0, name
    for part in ("model", "ema", "optimizer"):
        _close(saved[part], two[0][part], 0.0)
    alone = _one_rank(_dump(tiny(changes)), 0, tmp_path / "alone")
    assert alone["start"] == 7
    for part in ("model", "ema", "optimizer"):
        _close(alone[part], saved[part], 0.0)
    assert torch.equal(alone["accumulators"][0], saved["accumulators"].sum(0))
    # and the other way round: what one rank saved, two ranks continue
    more = run_ranks(_train, _folder(tmp_path, "more"), tree, 1)
    assert more[0]["start"] == 7
    further = _one_rank(_dump(tiny({**changes, "name": "ref"})), 8, tmp_path / "ref")
    _close(more[0]["model"], further["model"], 1e-3)


@pytest.mark.parametrize("ranks_after", [1, 2, 4])
def test_counts_of_the_unfinished_period_are_not_lost(
    tiny: MakeConfig, tmp_path: Path, ranks_after: int
) -> None:
    """Two ranks, saved at step 7 of periods of 5, go on past the update at 10 (cases 25, 26)."""
    changes = {"model.activation": "silu"}
    unbroken = _dump(tiny({**changes, "name": "unbroken"}))
    expected = run_ranks(_train, _folder(tmp_path, "u"), unbroken, 11)[0]
    broken = _dump(tiny({**changes, "name": "broken"}))
    run_ranks(_train, _folder(tmp_path, "b"), broken, 7)
    found = run_ranks(_train, _folder(tmp_path, "c"), broken, 4, world_size=ranks_after)[0]
    assert found["start"] == 7
    tolerance = 0.0 if ranks_after == 2 else 1e-3
    for key in ("pi_u", "phi"):
        _close(found["method"][key], expected["method"][key], tolerance)
    _close(found["model"], expected["model"], 0.0 if ranks_after == 2 else 1e-2)
    # The class counts; what follows them are the meter's sums, which grow with the ranks.
    _close(found["accumulators"].sum(0)[:20], expected["accumulators"].sum(0)[:20], 0.05)


def _folder(parent: Path, name: str) -> Path:
    path = parent / name
    path.mkdir()
    return path


def test_a_bad_loss_on_one_rank_stops_both(tiny: MakeConfig, tmp_path: Path) -> None:
    tree = _dump(tiny({"optim.lr": 1e6, "optim.grad_clip": None}))
    first, second = run_ranks(_fit, tmp_path, tree)
    for result in (first, second):
        assert "NonFiniteLossError" in result["error"]
    assert first["error"].split(";")[0] == second["error"].split(";")[0]


def test_evaluation_is_the_same_number_on_both_ranks(tiny: MakeConfig, tmp_path: Path) -> None:
    first, second = run_ranks(_fit, tmp_path, _dump(tiny()))
    assert first == second
    assert first["error"] == ""


def _disagree(rank: int, world_size: int, tree: dict[str, Any]) -> str:
    config = parse_config({**tree, "seed": 1 + rank})
    try:
        Trainer(config, _ranks(config, rank, world_size))
    except ConfigError as error:
        return str(error)
    return "no error"


def test_ranks_with_different_configurations_are_refused(tiny: MakeConfig, tmp_path: Path) -> None:
    """Case 7: before the first step, on every rank, with both values."""
    for message in run_ranks(_disagree, tmp_path, _dump(tiny())):
        assert "rank 1 has another configuration than rank 0" in message
