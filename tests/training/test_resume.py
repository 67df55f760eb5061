"""What a run may go on with: other values of keys, other files, a checkpoint that does not fit."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.run.checkpoint import list_checkpoints, read_checkpoint
from simpro_fast.training.resume import is_finished
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError

MakeConfig = Callable[..., Config]


def start(config: Config) -> int:
    """The step that a start of this configuration goes on from."""
    trainer = Trainer(config, start_ranks(config))
    trainer.close()
    return trainer.step


@pytest.fixture
def saved(tiny: MakeConfig) -> MakeConfig:
    """A factory like `tiny`, beside a run that has saved steps 2 and 4 of 12."""
    config = tiny({"checkpoint.every": 2})
    trainer = Trainer(config, start_ranks(config))
    for _ in range(4):
        trainer.train_step()
        if trainer.step % 2 == 0:
            trainer.save()
    trainer.close()
    return tiny


@pytest.mark.parametrize(
    "changes",
    [
        {"train.data_threads": 2, "train.profile": True, "evaluate.every": 2, "name": "tiny"},
        {"evaluate.batch_size": 7, "data.cache_dir": "/nowhere", "log.tensorboard": True},
        {"checkpoint.every": 5, "distributed.start_timeout": 5, "data.on_bad_image": "skip"},
    ],
)
def test_what_changes_nothing_may_change(saved: MakeConfig, changes: dict[str, Any]) -> None:
    assert start(saved(changes)) == 4


def test_other_rounding_is_said(saved: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "simpro_fast")
    try:
        assert start(saved({"train.threads": 2})) == 4
    finally:
        torch.set_num_threads(1)
    assert "round differently (train.threads: 1 -> 2)" in caplog.text


@pytest.mark.parametrize(
    ("key", "value"), [("distributed.sync_bn", "average_buffers"), ("distributed.micro_batch", 4)]
)
def test_what_changes_the_training_is_refused(saved: MakeConfig, key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"another configuration \({key}: "):
        start(saved({key: value}))


def spoil(config: Config, change: Callable[[dict[str, Any]], object]) -> Path:
    """Change what the newest checkpoint holds; the file stays whole."""
    path = list_checkpoints(config.run_dir / "checkpoints")[0]
    state = read_checkpoint(path)
    change(state)
    torch.save(state, path)
    return path


def _first(state: dict[str, Any], part: str) -> str:
    """The name of the first matrix of a part."""
    tensors = state["tensors"].items()
    return next(name for name, value in tensors if name.startswith(part) and value.dim() > 1)


def _joined(position: int, label: int) -> Callable[[dict[str, Any]], object]:
    """One pseudo-labeled image."""
    values = {"positions": [position], "labels": [label], "since": 2}
    named = {f"pseudo_labeled/{name}": torch.tensor(value) for name, value in values.items()}
    return lambda state: state["tensors"].update(named)


WRONG: dict[str, Callable[[dict[str, Any]], object]] = {
    "part missing": lambda state: state.pop("tensors"),
    "part of another type": lambda state: state.update(per_rank=[1, 2]),
    "no tensor": lambda state: state["tensors"].update(phase="second"),
    "weight missing": lambda state: state["tensors"].pop(_first(state, "model/")),
    "average missing": lambda state: state["tensors"].pop(_first(state, "average/")),
    "weight of another shape": lambda state: state["tensors"].update(
        {_first(state, "average/"): torch.zeros(3)}
    ),
    "optimizer of another shape": lambda state: state["tensors"].update(
        {_first(state, "optimizer/"): torch.zeros(3)}
    ),
    "optimizer of other weights": lambda state: state["tensors"].update(
        {"optimizer/momentum_buffer/other": torch.zeros(3)}
    ),
    "prior of another length": lambda state: state["tensors"].update(
        {"method/pi_u": torch.zeros(3).double()}
    ),
    "counts of another length": lambda state: state["per_rank"].update(
        {"method/labeled_count": torch.zeros(1, 3).double()}
    ),
    "counts missing": lambda state: state["per_rank"].pop("meter/sums"),
    "heads of another method": lambda state: state["tensors"].update(
        {"model/head.weight": torch.zeros(20, 128), "model/head.bias": torch.zeros(20)}
    ),
    "phase that is none": lambda state: state["tensors"].update(phase=torch.zeros(2)),
    "labels of no class": _joined(3, 10),
    "joined images of another list": _joined(9**9, 1),
    "weights not finite": lambda state: state["tensors"][_first(state, "average/")].fill_(
        torch.nan
    ),
    "unknown key": lambda state: state["config"]["optim"].update(lrr=1.0),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_file_that_can_be_read_but_is_wrong_is_named_and_the_one_before_used(
    saved: MakeConfig, caplog: pytest.LogCaptureFixture, change: Callable[[dict[str, Any]], object]
) -> None:
    config = saved()
    path = spoil(config, change)
    assert start(config) == 2
    warned = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1 and str(path) in warned[0].getMessage()
    assert warned[0].getMessage().endswith("trying the one before")
    assert warned[0].found_by_all  # type: ignore[attr-defined]
    assert [p.name for p in list_checkpoints(config.run_dir / "checkpoints")] == [
        "step_000000002.pt"
    ]


def test_a_wrong_file_that_was_asked_for_is_an_error(saved: MakeConfig) -> None:
    path = spoil(saved(), WRONG["weight of another shape"])
    with pytest.raises(UserError, match=r"can be read, but does not fit this run: .*size mismatch"):
        start(saved({"checkpoint.resume": str(path)}))


def test_a_damaged_configuration_does_not_hide_that_a_run_is_finished(
    tiny: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny({"train.steps": 2, "train.period": 1})
    trainer = Trainer(config, start_ranks(config))
    trainer.fit()
    trainer.close()
    (config.run_dir / "config.yaml").write_bytes(b"name: [\xff")
    assert is_finished(config, start_ranks(config))
    assert "config.yaml" in caplog.text and "not compared" in caplog.text
