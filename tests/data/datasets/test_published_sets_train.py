"""Every family of shipped experiments trains three steps from small files of its set's format.

By the line of configs/README.md that tries an experiment: its own network, method and data path.
Only the engine is the plain one, to save the time of starting DeepSpeed.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simpro_fast.cli.train import main as train_main
from tests.config.test_shipped_configs import CONFIGS, NAMES
from tests.data.cifar_format import cifar10_members, cifar100_members, write_folder
from tests.data.fashion_mnist_format import write_fashion
from tests.data.imagenet_tree_format import write_imagenet_tree
from tests.data.small_imagenet_format import write_small_imagenet
from tests.data.stl10_format import stl10_members, write_stl10
from tests.data.svhn_format import write_svhn

Train = Callable[..., dict[str, Any]]
_LINE = re.search(
    r"^simpro-fast train \S+ data\.root=\S+ (.+)$", (CONFIGS / "README.md").read_text(), re.M
)
assert _LINE is not None
TRY = [
    *shlex.split(_LINE[1]),
    *("train.threads=1", "evaluate.batch_size=32", "distributed.engine=plain"),
    *("log.progress=off", "log.tensorboard=false", "log.figures=false"),
]
# The files that the tests write have so few images.
FEW = ("data.labeled_max=2", "data.unlabeled_max=4", "data.gamma_labeled=2")
FEW_1K = ("data.total_max=5", "data.gamma_labeled=1")


@pytest.fixture
def train(tmp_path: Path) -> Iterator[Train]:
    """Runs the command on files in `tmp_path`; gives summary, rows of metrics, configuration."""
    runs = tmp_path / "runs"

    def run(name: str, *overrides: str) -> dict[str, Any]:
        places = [f"output_dir={runs}"]
        if not name.startswith("digits_lt/"):  # which have no files
            places.append(f"data.root={tmp_path}")
        assert train_main([name, *TRY, *places, *overrides, f"name={name}"]) == 0
        folder = runs / name / "seed1"
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
        rows = [json.loads(line) for line in lines]
        assert summary["steps"] == 3 and [row["step"] for row in rows] == [2, 3]
        assert all(row["loss"] > 0 for row in rows)
        assert sum(rows[-1]["pi_u"]) == pytest.approx(1)
        return {**summary, "rows": rows, "folder": folder}

    yield run
    shutil.rmtree(runs)  # real networks leave hundreds of megabytes


def write_cifar10(root: Path) -> None:
    write_folder(root, "cifar-10-batches-py", cifar10_members())


def write_cifar100(root: Path) -> None:
    write_folder(root, "cifar-100-python", cifar100_members(per_class=6))


def write_fashion_mnist(root: Path) -> None:
    write_fashion(root, train=80, test=20)


def write_nothing(root: Path) -> None:
    """The digits come with scikit-learn."""


# Two labeled and four unlabeled images of the head, half as many of the tail (rounded down).
FAMILIES = [
    (write_nothing, "digits_lt/reversed", (), 11),
    (write_fashion_mnist, "fashion_mnist_lt/head_tail", (), 11),
    (write_cifar10, "cifar10_lt/reversed", (), 11),
    (write_svhn, "cifar10_lt/middle", ("data.name=svhn",), 11),
    (write_cifar100, "cifar100_lt/uniform", (), 101),
]


@pytest.mark.parametrize(("write", "name", "overrides", "labeled"), FAMILIES)
def test_long_tails_of_arrays(
    tmp_path: Path,
    train: Train,
    write: Callable[[Path], None],
    name: str,
    overrides: tuple[str, ...],
    labeled: int,
) -> None:
    write(tmp_path)
    summary = train(name, *FEW, *overrides)
    assert sum(summary["labeled_counts"]) == labeled
    assert summary["labeled_counts"][0] == 2 and max(summary["unlabeled_counts"]) == 4
    assert summary["kl_pi_u"] >= 0


@pytest.mark.slow
def test_stl10_trains_without_a_truth(
    tmp_path: Path, train: Train, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that needs the true classes of the unlabeled images is shown or written."""
    write_stl10(tmp_path, stl10_members())
    summary = train("stl10_lt/gamma10", *FEW, "log.figures=true")
    assert summary["kl_pi_u"] is None and summary["pi_u_true"] is None
    assert summary["unlabeled_counts"] is None
    assert summary["top1"] is not None
    for row in summary["rows"]:
        assert row["loss"] > 0 and len(row["pi_u"]) == 10
        assert row["kl_pi_u"] is None and row["pseudo_label_accuracy"] is None
    split = json.loads((summary["folder"] / "split.json").read_text())
    assert split["num_unlabeled"] == 40 and split["unlabeled_counts"] is None
    assert "truth" not in capsys.readouterr().out
    figures = {path.name for path in (summary["folder"] / "report").iterdir()}
    assert "prior.png" in figures and "kl.png" not in figures


# One validation image of each of six classes: the real network is slow on a CPU.
VAL = np.array([1, 1000, 500, 250, 750, 2])


def network(summary: dict[str, Any]) -> str:
    name: str = json.loads((summary["folder"] / "model.json").read_text())["model"]["name"]
    return name


@pytest.mark.slow  # its files are read by test_small_imagenet, and ImageNet's tree trains below
def test_small_imagenet_127(tmp_path: Path, train: Train) -> None:
    write_small_imagenet(tmp_path, tmp_path, 6, VAL)
    summary = train("small_imagenet_127/32")
    assert network(summary) == "resnet50_3x3"
    assert summary["labeled_counts"][0] == 131 and len(summary["labeled_counts"]) == 127
    assert summary["class_names"][0].startswith("n01861778 ")
    assert sum(summary["unlabeled_counts"]) == 6000 - sum(summary["labeled_counts"])
    assert summary["kl_pi_u"] > 0


def test_small_imagenet_1k(tmp_path: Path, train: Train) -> None:
    """At 64 px with a small network; the real one at that size is tested by itself."""
    write_small_imagenet(tmp_path, tmp_path, 5, VAL, side=64)
    summary = train("small_imagenet_1k/64", *FEW_1K, "model.name=small_cnn")
    assert summary["labeled_counts"] == [1] * 1000
    assert summary["unlabeled_counts"] == [4] * 1000
    assert summary["class_names"][0] == "kit_fox"


@pytest.mark.slow
def test_imagenet_from_its_jpeg_tree(tmp_path: Path, train: Train) -> None:
    write_imagenet_tree(tmp_path, 6, val_classes=6)
    summary = train("imagenet_1k/224", "data.image_size=64", *FEW_1K)
    assert network(summary) == "resnet50"
    assert summary["labeled_counts"] == [1] * 1000 and summary["unlabeled_counts"] == [4] * 1000
    summary = train(
        "imagenet_127/224",
        "data.image_size=64",
        "model.name=small_cnn",
        "model.activation=leaky_relu",
    )
    assert summary["labeled_counts"][0] == 131 and len(summary["labeled_counts"]) == 127


def test_no_family_is_left_out() -> None:
    own_tests = ["small_imagenet_127", "small_imagenet_1k", "imagenet_1k", "imagenet_127"]
    covered = {name.partition("/")[0] for _, name, _, _ in FAMILIES} | {*own_tests, "stl10_lt"}
    assert covered == {name.partition("/")[0] for name in NAMES}
