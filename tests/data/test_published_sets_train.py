"""Every published data set trains three steps from small files of its format.

The shipped experiment with smaller numbers of images and steps; nothing else is changed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cifar_format import cifar10_members, cifar100_members, write_folder
from small_imagenet_format import write_small_imagenet
from stl10_format import stl10_members, write_stl10
from svhn_format import write_svhn

from simpro_fast.config import Config, load_config
from simpro_fast.training.ranks import start_ranks
from simpro_fast.training.trainer import Trainer

SMALL = (
    *("data.batch_size=2", "data.mu=1", "train.steps=3", "train.period=2"),
    *("train.threads=1", "distributed.engine=plain", "log.progress=off", "log.tensorboard=false"),
)


def train(name: str, root: Path, *overrides: str) -> tuple[Config, dict[str, Any]]:
    """The summary of a run whose files are in `root`."""
    places = (f"data.root={root}", f"output_dir={root / 'runs'}")
    config = load_config(name, [*SMALL, *places, *overrides])
    trainer = Trainer(config, start_ranks(config))
    try:
        return config, trainer.fit()
    finally:
        trainer.close()


def rows(config: Config) -> list[dict[str, Any]]:
    lines = (config.run_dir / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def write_cifar10(root: Path) -> None:
    write_folder(root, "cifar-10-batches-py", cifar10_members())


def write_cifar100(root: Path) -> None:
    write_folder(root, "cifar-100-python", cifar100_members(per_class=3))


TEN = ("data.labeled_max=4", "data.unlabeled_max=6", "data.gamma_labeled=2")
HUNDRED = ("data.labeled_max=1", "data.unlabeled_max=2", "data.gamma_labeled=1")


@pytest.mark.parametrize(
    ("write", "name", "overrides", "labeled"),
    [
        (write_cifar10, "cifar10_lt/reversed", TEN, 25),
        (write_svhn, "cifar10_lt/middle", ("data.name=svhn", *TEN), 25),
        (write_cifar100, "cifar100_lt/uniform", HUNDRED, 100),
    ],
)
def test_trains_three_steps(
    tmp_path: Path,
    write: Callable[[Path], None],
    name: str,
    overrides: tuple[str, ...],
    labeled: int,
) -> None:
    write(tmp_path)
    config, summary = train(name, tmp_path, *overrides)
    assert summary["steps"] == 3
    assert sum(summary["labeled_counts"]) == labeled
    assert summary["kl_pi_u"] >= 0
    assert [row["step"] for row in rows(config)] == [2, 3]
    assert all(row["loss"] > 0 for row in rows(config))


def test_stl10_trains_without_a_truth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing that needs the true classes of the unlabeled images is shown or written."""
    write_stl10(tmp_path, stl10_members())
    sizes = ("data.labeled_max=3", "data.gamma_labeled=3")
    config, summary = train("stl10_lt/gamma10", tmp_path, *sizes)
    assert summary["steps"] == 3
    assert summary["kl_pi_u"] is None and summary["pi_u_true"] is None
    assert summary["unlabeled_counts"] is None
    assert summary["top1"] is not None
    for row in rows(config):
        assert row["loss"] > 0 and len(row["pi_u"]) == 10
        assert row["kl_pi_u"] is None and row["pseudo_label_accuracy"] is None
    split = json.loads((config.run_dir / "split.json").read_text())
    assert split["num_unlabeled"] == 40 and split["unlabeled_counts"] is None
    assert "truth" not in capsys.readouterr().out
    figures = {path.name for path in (config.run_dir / "report").iterdir()}
    assert {"views.png", "prior.png"} <= figures and "kl.png" not in figures


# One validation image of each of six classes: the real network is slow on a CPU.
VAL = np.array([1, 1000, 500, 250, 750, 2])


def test_small_imagenet_127_trains_its_network(tmp_path: Path) -> None:
    write_small_imagenet(tmp_path, tmp_path, 6, VAL)
    sizes = ("data.batch_size=1", "train.period=3")
    config, summary = train("small_imagenet_127/32", tmp_path, *sizes)
    assert config.model.name == "resnet50_3x3"
    assert summary["labeled_counts"][0] == 131 and len(summary["labeled_counts"]) == 127
    assert summary["class_names"][0].startswith("n01861778 ")
    assert sum(summary["unlabeled_counts"]) == 6000 - sum(summary["labeled_counts"])
    assert summary["kl_pi_u"] > 0 and rows(config)[0]["loss"] > 0


def test_small_imagenet_1k_trains(tmp_path: Path) -> None:
    """At 64 px with a small network; the real one at that size is tested by itself."""
    write_small_imagenet(tmp_path, tmp_path, 5, VAL, side=64)
    sizes = ("data.total_max=5", "data.gamma_labeled=1", "model.name=small_cnn")
    config, summary = train("small_imagenet_1k/64", tmp_path, *sizes)
    assert summary["labeled_counts"] == [1] * 1000
    assert summary["unlabeled_counts"] == [4] * 1000
    assert summary["class_names"][0] == "kit_fox"
    assert rows(config)[-1]["loss"] > 0
