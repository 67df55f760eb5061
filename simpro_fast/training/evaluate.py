"""The test of a run: its EMA network on the test images of its split."""

from __future__ import annotations

from torch import nn

from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.splits.split import Split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.evaluation import Evaluation, evaluate


def evaluate_split(
    network: nn.Module, dataset: ArrayDataset, split: Split, ranks: Ranks, batch_size: int
) -> Evaluation | None:
    """Accuracy over all ranks, equal on each of them; None without test images."""
    if not len(split.test):
        return None
    images, labels = dataset.test_part
    return evaluate(
        network,
        select(images, split.test),
        labels[split.test],
        mean=dataset.mean,
        std=dataset.std,
        num_classes=dataset.num_classes,
        device=ranks.device,
        batch_size=batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
    )
