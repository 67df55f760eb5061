"""Training as a guest of a process: `train`, `register_dataset`, `register_model`."""

from __future__ import annotations

import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import simpro_fast
from simpro_fast.cli.train import main as train_main
from simpro_fast.config import Config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets import registry
from simpro_fast.models import build
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import ConfigError, UserError
from tests.conftest import TINY

OWN_CODE = """
import numpy as np
from simpro_fast import ArrayDataset
from torch import nn


def load_stripes(data):
    labels = np.arange(300) % 3
    images = np.zeros((300, 16, 16, 3), np.uint8)
    for image, label in zip(images, labels):
        image[label::3] = 200
    return ArrayDataset(
        name="stripes", images=images, labels=labels, class_names=("a", "b", "c"),
        test_images=None, test_labels=None, mean=(0.3,) * 3, std=(0.4,) * 3, flip=True,
    )


def build_net(num_classes, image_size):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes),
    )
"""


@pytest.fixture
def tree(tmp_path: Path) -> dict[str, Any]:
    return {**copy.deepcopy(TINY), "output_dir": tmp_path / "runs"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module `own_stripes` of a user, importable; registrations end with the test."""
    monkeypatch.setattr(registry, "_REGISTERED", {})
    monkeypatch.setattr(build, "_REGISTERED", {})
    (tmp_path / "own_stripes.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import own_stripes

    yield own_stripes
    sys.modules.pop("own_stripes")


def traces() -> dict[str, Any]:
    """What a training could leave behind in its process."""
    logger = simpro_fast.training.in_process.logging.getLogger("simpro_fast")
    return {
        "threads": {t.name for t in threading.enumerate()},
        "handlers": [signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "wakeup": signal.set_wakeup_fd(-1),
        "group": dist.is_initialized(),
        "torch threads": torch.get_num_threads(),
        "logs": (logger.level, list(logger.handlers)),
        "random": torch.get_rng_state().tolist(),
    }


def test_two_runs_in_one_process_leave_nothing_behind(
    tree: dict[str, Any], tmp_path: Path, tiny: Callable[..., Config]
) -> None:
    from simpro_fast.training import in_process  # noqa: F401

    torch.set_num_threads(2)
    before = traces()
    first = simpro_fast.train(tree)
    second = simpro_fast.train(tree, "seed=2", "distributed.engine=deepspeed")
    assert traces() == before
    torch.set_num_threads(1)
    assert (first.path, second.path) == tuple(
        tmp_path / "runs" / "tiny" / seed for seed in ("seed1", "seed2")
    )
    for run in (first, second):
        assert run.summary["steps"] == 12 and [row["step"] for row in run.metrics] == [5, 10, 12]
        label = run.model.predict(np.zeros((16, 16, 3), np.uint8))[0].label
        assert label in run.summary["class_names"]
        assert str(run.path) in repr(run) and len(repr(run)) < 300
    # The same training as by the command: here a Config, and the trainer by hand.
    config = tiny({"name": "by_hand"})
    by_hand = simpro_fast.train(config)
    assert by_hand.metrics[-1]["loss"] == first.metrics[-1]["loss"]


def test_ctrl_c_in_a_cell_goes_on_from_the_last_checkpoint(
    tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = simpro_fast.train(tree, "name=whole")
    step = Trainer.train_step

    def interrupted(self: Trainer) -> None:
        if self.step == 9:
            signal.raise_signal(signal.SIGINT)
        step(self)

    monkeypatch.setattr(Trainer, "train_step", interrupted)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            simpro_fast.train(tree)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    capsys.readouterr()
    run = simpro_fast.train(tree)
    assert "resumed from" in capsys.readouterr().out
    assert run.metrics[-1]["loss"] == whole.metrics[-1]["loss"]
    assert simpro_fast.train(tree).metrics == run.metrics
    assert "is finished" in capsys.readouterr().out


def test_names_registered_in_this_process(own: Any, tree: dict[str, Any]) -> None:
    simpro_fast.register_dataset("stripes", own.load_stripes)
    simpro_fast.register_model("small", own.build_net)
    run = simpro_fast.train(tree, "data.name=stripes", "model.name=small", "data.flip=false")
    assert run.summary["class_names"] == ["a", "b", "c"]
    assert simpro_fast.load_model(run.path).class_names == ("a", "b", "c")
    build._REGISTERED.clear()
    with pytest.raises(UserError, match=r"'small' is unknown.*register_model"):
        simpro_fast.load_model(run.path)
    for register, name in (
        (simpro_fast.register_dataset, "digits"),
        (simpro_fast.register_model, "wrn_16_4"),
        (simpro_fast.register_model, "timm/mine"),
    ):
        with pytest.raises(ValueError, match="is a shipped"):
            register(name, own.build_net)


def test_dotted_paths(own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(own.__file__).parent
    monkeypatch.chdir(folder)
    command = [
        *("digits_lt/reversed", "name=own", "distributed.engine=plain"),
        *("data.name=own_stripes.load_stripes", "model.name=own_stripes.build_net"),
        *("train.steps=3", "train.period=2", "data.batch_size=2", "train.threads=1"),
        *("data.labeled_max=20", "data.unlabeled_max=40", "log.figures=false"),
        "evaluate.shares_images=0",
    ]
    assert train_main(command) == 0
    run = folder / "runs" / "own" / "seed1"
    with pytest.raises(UserError, match=r"own_stripes\.build_net, code outside .*--trust-code"):
        simpro_fast.load_model(run)
    model = simpro_fast.load_model(run, trust_code=True)
    assert isinstance(model.module, nn.Sequential) and model.class_names == ("a", "b", "c")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.name=stripe", "did you mean 'stripes'"),
        ("model.name=smal", "did you mean 'small'"),
        (
            "data.name=own_stripe.load",
            "no module own_stripe .*PYTHONPATH",
        ),
        ("data.name=own_stripes.load_stripe", "did you mean own_stripes.load_stripes"),
        ("data.name=own_stripes.sixteen_bit", r"images must be squares.*uint16 \[300, 16, 16, 3\]"),
        ("data.name=own_stripes.wrong_labels", "labels go from 1 to 3, expected 0 to 2"),
        ("data.name=own_stripes.nothing", "returned NoneType, expected an ArrayDataset"),
        ("model.name=own_stripes.nothing", "cannot be called as builder"),
        ("model.name=own_stripes.no_head", r"two images gave \[2, 3, 16, 16\]"),
        ("model.name=own_stripes.weightless", "no parameters"),
        ("model.name=os.kill", "cannot be called as builder"),
        ("model.name=broken.build", "importing broken failed .SyntaxError"),
    ],
)
def test_what_is_wrong_with_own_code(
    own: Any, tree: dict[str, Any], override: str, said: str
) -> None:
    Path(own.__file__).with_name("broken.py").write_text("def build(:")
    simpro_fast.register_dataset("stripes", own.load_stripes)
    simpro_fast.register_model("small", own.build_net)
    loaded = own.load_stripes(DataConfig())
    own.sixteen_bit = lambda data: replace(loaded, images=loaded.images.astype(np.uint16))
    own.wrong_labels = lambda data: replace(loaded, labels=loaded.labels + 1)
    own.nothing = lambda data: None
    own.no_head = lambda num_classes, image_size: nn.Identity()
    own.weightless = lambda num_classes, image_size: nn.Sequential(
        nn.Flatten(), nn.AdaptiveAvgPool1d(num_classes)
    )
    with pytest.raises(UserError, match=said):
        simpro_fast.train(tree, override)
    assert not (tree["output_dir"] / "tiny" / "seed1").exists()


def test_what_train_refuses(tree: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'train\.step'"):
        simpro_fast.train(tree, "train.step=3")
    with pytest.raises(ConfigError, match="did you mean 'digits_lt/reversed'"):
        simpro_fast.train("digits_lt/revers")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"one process.*launch/train\.py"):
        simpro_fast.train(tree)
