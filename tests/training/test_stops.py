"""A stop asked for in long work that is not training: evaluation, labelling, the end of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from torch import nn

from simpro_fast.answers.evaluation import network_logits
from simpro_fast.config import Config, parse_config
from simpro_fast.distributed.signals import Preempted
from simpro_fast.run.checkpoint import list_checkpoints
from simpro_fast.run.directory import RunDirectory
from simpro_fast.training.trainer import Trainer
from tests.distributed.outcomes import outcome
from tests.distributed.rank_runs import dump, on_ranks, start
from tests.training.test_every_method import changes_of

MakeConfig = Callable[..., Config]


def run_with_stop(
    rank: int, world_size: int, tree: dict[str, Any], at: int | None
) -> tuple[int, int | None]:
    """Train; the last rank alone is asked to stop at look `at` of all looks for a stop.

    Returns:
        looks, and the step that was saved on the way out, None where the run finished.
    """
    config = parse_config(tree)
    trainer = Trainer(config, start(config, rank, world_size))
    looks, look = [0], trainer.guard.asked_to_stop

    def counted() -> bool:
        looks[0] += 1
        if looks[0] == at and rank == world_size - 1:
            trainer.requests.reason = "SIGTERM"
        return look()

    trainer.guard.asked_to_stop = counted  # type: ignore[method-assign]
    saved = None
    try:
        trainer.fit()
    except Preempted as stop:
        saved = stop.saved_step
        assert saved == trainer.step
    finally:
        trainer.close()
    return looks[0], saved


def settings(make: MakeConfig, run: str, unlabeled: int) -> Config:
    """Periods of two steps, evaluated in batches of 40, of a method that labels images between."""
    own = changes_of("crest_plus", **{"checkpoint.every": 100, "evaluate.batch_size": 40})
    looked_at = {"evaluate.shares_images": unlabeled}
    return make({**own, **looked_at, "name": run, "train.steps": 8})


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_stop_at_any_look_loses_no_step(tiny: MakeConfig, world_size: int) -> None:
    unlabeled = 100 if world_size == 1 else 0  # an estimate takes seconds
    unbroken = settings(tiny, "unbroken", unlabeled)
    looks, saved = on_ranks(world_size, run_with_stop, dump(unbroken), None)[0]
    assert saved is None and looks > 10
    expected, steps = outcome(unbroken), set()
    # The first evaluation, the labelling after it, and the last work of the run.
    for at in (2, looks // 3, looks) if world_size == 2 else (2, looks // 3, 2 * looks // 3, looks):
        config = settings(tiny, f"at{at}", unlabeled)
        found = on_ranks(world_size, run_with_stop, dump(config), at)
        assert len({saved for _, saved in found}) == 1
        (_, saved) = found[0]
        assert saved is not None
        steps.add(saved)
        assert list_checkpoints(config.run_dir / "checkpoints")[0].name == f"step_{saved:09d}.pt"
        on_ranks(world_size, run_with_stop, dump(config), None)
        outcome(config).assert_equal(expected)
    assert {2, 8} < steps


def test_an_agreed_stop_is_obeyed_before_the_evaluation(tiny: MakeConfig) -> None:
    config = tiny({"checkpoint.every": 100, "train.period": 5})
    trainer = Trainer(config, start(config, 0, 1))
    evaluated: list[int] = []
    evaluate = trainer.evaluate
    trainer.evaluate = lambda **k: (  # type: ignore[method-assign]
        evaluated.append(trainer.step) or evaluate(**k)  # type: ignore[func-returns-value]
    )
    while trainer.step < 4:
        trainer.train_step()
    trainer.requests.reason = "SIGTERM"
    with pytest.raises(Preempted) as stop:
        trainer.fit()
    trainer.close()
    assert stop.value.saved_step == 5 and evaluated == []
    assert not config.run_dir.joinpath("metrics.jsonl").exists()
    again = Trainer(config, start(config, 0, 1))
    again.fit()
    again.close()
    assert [row["step"] for row in outcome(config).metrics] == [5, 10, 12]


def test_ranks_with_unequal_shares_look_for_a_stop_equally_often() -> None:
    """Each look is a collective: one look more on one rank would wait for ever."""
    images, looks = np.zeros((33, 2, 2, 3), np.uint8), [0, 0]

    def look(rank: int) -> None:
        looks[rank] += 1

    for rank in range(2):
        shares = network_logits(
            nn.Flatten(),
            images,
            mean=(0.5,) * 3,
            std=(0.5,) * 3,
            device="cpu",
            batch_size=16,
            rank=rank,
            world_size=2,
            between=lambda rank=rank: look(rank),  # type: ignore[misc]
        )
        assert sum(len(logits) for _, logits in shares) == 16 + rank
    assert looks == [2, 2]


def test_a_kill_right_after_a_row_of_metrics_does_not_write_it_twice(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken, broken = (tiny({"name": n, "checkpoint.every": 5}) for n in ("whole", "killed"))
    on_ranks(1, run_with_stop, dump(unbroken), None)
    append = RunDirectory.append_metrics

    def killed(run: RunDirectory, row: dict[str, Any], on_error: str) -> None:
        append(run, row, on_error)
        if row["step"] == 10:
            raise RuntimeError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(RunDirectory, "append_metrics", killed)
        with pytest.raises(RuntimeError, match="killed"):
            on_ranks(1, run_with_stop, dump(broken), None)
    on_ranks(1, run_with_stop, dump(broken), None)
    outcome(broken).assert_equal(outcome(unbroken))
