"""TensorBoard and Weights & Biases: what arrives, and that none of them ends a run."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import wandb

from simpro_fast.config import Config
from simpro_fast.distributed.process_group import start_ranks
from simpro_fast.run import loggers as module
from simpro_fast.run.loggers import Loggers, scalars_of
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError

MakeConfig = Callable[..., Config]
ALL = {"log.tensorboard": True, "log.wandb": "digits", "log.figures": True}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.delenv("WANDB_DIR", raising=False)
    wandb.teardown()  # it keeps the environment of its first run


def train(config: Config) -> None:
    trainer = Trainer(config, start_ranks(config))
    try:
        trainer.fit()
    finally:
        trainer.close()


def test_a_run_that_goes_on_is_the_same_one_everywhere(tiny: MakeConfig) -> None:
    """Stopped at step 10 of 12; priors and accuracies per class and the figures arrive."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    train(tiny({**ALL, "train.steps": 10}))
    config = tiny(ALL)
    first = (config.run_dir / module.WANDB_ID).read_text()
    (config.run_dir / "summary.json").unlink()
    train(config)
    assert (config.run_dir / module.WANDB_ID).read_text() == first

    rows = [json.loads(line) for line in (config.run_dir / "metrics.jsonl").open()]
    assert [row["step"] for row in rows] == [5, 10, 12]
    prior = [row["pi_u"][3] for row in rows]
    accuracy = [row["per_class"][9] for row in rows]

    events = EventAccumulator(str(config.run_dir / "tensorboard")).Reload()
    told = [(event.step, event.value) for event in events.Scalars("per_class/9 9")]
    assert told == [(s, pytest.approx(v)) for s, v in zip([5, 10, 12], accuracy, strict=True)]
    assert "report/prior" in events.Tags()["images"]

    starts = sorted((config.run_dir / "wandb").glob("offline-run-*"))
    assert {start.name.rpartition("-")[2] for start in starts} == {first}
    sent = b"".join(p.read_bytes() for p in (config.run_dir / "wandb").rglob("*.wandb"))
    for part in ("pi_u/3 3", "per_class/9 9", repr(prior[-1]), "method.tau", "digits"):
        assert part.encode() in sent, part
    assert list((config.run_dir / "wandb").rglob("*.png"))


def test_a_fresh_start_is_a_new_run(tiny: MakeConfig) -> None:
    config = tiny({"log.wandb": "one", "train.steps": 5})
    ids = []
    for _ in range(2):
        train(config)
        ids.append((config.run_dir / module.WANDB_ID).read_text())
        for path in config.run_dir.glob("checkpoints/*.pt"):
            path.unlink()
    assert ids[0] != ids[1]


class Refuses:
    """A logger that fails at its second row."""

    def __init__(self, error: Exception) -> None:
        self.error, self.seen = error, 0

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.seen += 1
        if self.seen == 2:
            raise self.error

    def figure(self, path: Path, step: int) -> None:
        raise AssertionError("it had failed before")

    def close(self, *, finished: bool) -> None:
        raise AssertionError("it had failed before")


def test_a_failing_logger_is_one_warning_and_off(caplog: pytest.LogCaptureFixture) -> None:
    one = Refuses(ConnectionError("no route\nto host"))
    loggers = Loggers({"log.wandb": one})
    with caplog.at_level(logging.WARNING):
        for step in range(4):
            loggers.write({"step": step, "loss": 1.0})
        loggers.figures([Path("x.png")], 4)
        loggers.close(4, finished=True)
    assert one.seen == 2
    assert [r.getMessage() for r in caplog.records] == [
        "log.wandb ends at step 1, training goes on: no route to host"
    ]


def test_what_cannot_start_is_a_warning(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("NETRC", "/dev/null")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    config = tiny({"log.wandb": True, "train.steps": 5})
    with caplog.at_level(logging.WARNING):
        train(config)
    assert (config.run_dir / "summary.json").is_file()
    said = [r.getMessage() for r in caplog.records if "cannot start" in r.getMessage()]
    assert [line.split()[0] for line in said] == ["log.wandb"]


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_said_before_training(
    tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=rf"log.{name} needs {name}.*log.{name}=false"):
        module.check_packages(tiny({f"log.{name}": True}))


def test_a_package_that_cannot_be_imported_is_one_line(
    tiny: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    config = tiny({"log.tensorboard": True})
    with pytest.raises(UserError, match=r"needs tensorboard: `pip .*tensorboard=false"):
        module.start_loggers(config, tmp_path, [], 0, fresh=True)


def test_secrets_of_the_command_stay_out(tiny: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "--token=SEKRET1"])
    monkeypatch.setenv("WANDB_API_KEY", "S3KRET2" * 6)
    config = tiny({"log.wandb": True, "train.steps": 5})
    train(config)
    for path in config.output_dir.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert not any(word in content for word in (b"SEKRET1", b"S3KRET2")), path


def test_only_finite_numbers_are_scalars() -> None:
    row: dict[str, Any] = {
        **{"step": 7, "loss": float("nan"), "top1": None, "kl": 0.5},
        **{"pi_u": [0.25, 0.75], "other": [1.0, 2.0, 3.0]},
    }
    assert scalars_of(row, ["a\nb", "c"]) == {"kl": 0.5, "pi_u/0 a\\nb": 0.25, "pi_u/1 c": 0.75}
