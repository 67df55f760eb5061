"""The estimate of the unlabeled images' class shares at the end of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from simpro_fast.answers.model_file import read_model_file
from simpro_fast.config import Config, parse_config
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import with_counts
from simpro_fast.distributed.process_group import Ranks, start_ranks
from simpro_fast.training.measure import _readable, evaluate_split, unlabeled_shares
from simpro_fast.training.setup import Setup
from simpro_fast.training.trainer import Trainer
from simpro_fast.utils.errors import UserError
from tests.conftest import TINY
from tests.data.toy_split import make_dataset
from tests.distributed.gloo_ranks import run_ranks

MakeConfig = Callable[..., Config]


def train(config: Config) -> dict[str, Any]:
    trainer = Trainer(config, start_ranks(config))
    try:
        return trainer.fit()
    finally:
        trainer.close()


def test_summary_and_model_say_what_the_test_and_the_shares_gave(tiny: MakeConfig) -> None:
    config = tiny({"evaluate.every": 100, "evaluate.shares_images": 20_000})
    train(config)
    summary = json.loads((config.run_dir / "summary.json").read_text())
    shares, matrix = summary["shares"], np.array(summary["confusion"])
    assert shares["images"] == sum(summary["unlabeled_counts"]) and shares["unreadable"] == 0
    assert [row["class"] for row in shares["rows"]] == summary["class_names"]
    assert sum(row["estimate"] for row in shares["rows"]) == pytest.approx(1)
    assert all(0 <= row["low"] <= row["estimate"] <= row["high"] <= 1 for row in shares["rows"])
    assert 100 * matrix.trace() / matrix.sum() == pytest.approx(summary["top1"])
    assert sum(b["count"] for b in summary["reliability"]["bins"]) == matrix.sum()
    assert summary["top_k"] == 5 and summary["top_k_accuracy"] >= summary["top1"]
    model = read_model_file(config.run_dir / "model.json")
    assert model.confusion is not None and np.array(model.confusion).tolist() == matrix.tolist()
    assert model.temperature == summary["temperature"] is not None


def test_the_estimate_can_be_limited_and_left_out(tiny: MakeConfig) -> None:
    found = train(tiny({"evaluate.shares_images": 30}))["shares"]
    assert found["images"] == 30
    assert shares_of(0, 1, 0) is None


class ByRed(nn.Module):
    """Says the class that the red value names, and takes every third image of 1 for 0."""

    def forward(self, x: Tensor) -> Tensor:
        value = (x[:, 0, 0, 0] * 0.2 + 0.5) * 255
        return -(value[:, None] - torch.arange(3)).abs()


def shares_of(rank: int, world_size: int, most: int = 20_000) -> dict[str, Any] | None:
    dataset = make_dataset([60, 30, 10])
    everything = np.arange(100)
    split = with_counts(everything[:0], everything, everything[::2], dataset, False)
    ranks = Ranks(rank, rank, world_size, world_size, torch.device("cpu"))
    config = parse_config({**TINY, "evaluate": {"shares_images": most, "batch_size": 7}})
    setup = Setup(config, ranks, dataset, split)
    evaluation = evaluate_split(ByRed(), setup)
    return unlabeled_shares(ByRed(), setup, evaluation)


def test_several_ranks_estimate_what_one_does() -> None:
    alone = shares_of(0, 1)
    assert alone is not None and run_ranks(shares_of) == [alone, alone]
    for row, share in zip(alone["rows"], (0.6, 0.3, 0.1), strict=True):
        assert row["low"] < share < row["high"]


def test_without_a_test_set_there_is_no_estimate() -> None:
    dataset, ranks = make_dataset([6, 3]), Ranks(0, 0, 1, 1, torch.device("cpu"))
    rows = np.arange(9)
    split = with_counts(rows[:2], rows[2:], rows[:0], dataset, False)
    setup = Setup(parse_config({**TINY, "evaluate": {"shares_images": 9}}), ranks, dataset, split)
    assert evaluate_split(ByRed(), setup) is None
    assert unlabeled_shares(ByRed(), setup, None) is None


class Damaged:
    """Images of which two are damaged."""

    shape = (9, 1, 1, 3)

    def __getitem__(self, index: slice) -> np.ndarray:
        if {3, 7} & set(range(*index.indices(9))):
            raise UserError("damaged")
        return np.arange(9, dtype=np.uint8)[index, None, None, None] * np.ones(3, np.uint8)


def test_damaged_files_do_not_lose_a_finished_training() -> None:
    found = _readable(cast(np.ndarray, Damaged()), 0, 9)
    assert found.shape == (7, 1, 1, 3) and found[:, 0, 0, 0].tolist() == [0, 1, 2, 4, 5, 6, 8]


def test_images_of_the_published_unlabeled_part_are_looked_at() -> None:
    plain = make_dataset([20, 20])
    pool = np.zeros((50, 1, 1, 3), np.uint8)
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    dataset = ArrayDataset(**{**fields, "unlabeled_images": pool})
    rows = np.arange(40)
    split = with_counts(rows[:4], np.arange(50), rows, dataset, False)
    ranks = Ranks(0, 0, 1, 1, torch.device("cpu"))
    config = parse_config({**TINY, "evaluate": {"shares_images": 20_000}})
    network = nn.Sequential(nn.Flatten(), nn.Linear(3, 2))
    setup = Setup(config, ranks, dataset, split)
    found = unlabeled_shares(network, setup, evaluate_split(network, setup))
    assert found is not None and found["images"] == 50
