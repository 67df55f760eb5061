"""What the EMA network of a run says: of the test images, and of the unlabeled ones as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from simpro_fast.answers.class_shares import estimate_shares
from simpro_fast.answers.evaluation import Evaluation, evaluate, network_logits
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.sampling.draws import ShuffledOrder, Stream
from simpro_fast.training.setup import Setup
from simpro_fast.utils.errors import UserError

Between = Callable[[], None] | None

MOST_CLASSES = 200
"""Beyond, sampling takes minutes; `simpro-fast shares` does it when it is asked to."""


def evaluate_split(
    network: nn.Module,
    setup: Setup,
    *,
    temperature: bool = False,
    between: Between = None,
) -> Evaluation | None:
    """Accuracy over all ranks, equal on each of them; None without test images.

    Args:
        between: called before every batch, equally often on every rank; it may raise.
    """
    dataset, split, ranks = setup.dataset, setup.split, setup.ranks
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
        batch_size=setup.config.evaluate.batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        temperature=temperature,
        between=between,
    )


def unlabeled_shares(
    network: nn.Module,
    setup: Setup,
    evaluation: Evaluation | None,
    *,
    between: Between = None,
) -> dict[str, Any] | None:
    """Class shares of the unlabeled images with 95 % intervals, equal on all ranks.

    From the classes that the network predicts for at most `evaluate.shares_images` of them, drawn
    by the seed and shared among the ranks, and from the confusion matrix of the test. The intervals
    are of all of them.

    Returns:
        `shares` of summary.json; None without a confusion matrix or any image to look at, or with
        more than MOST_CLASSES classes.
    """
    config, dataset, split, ranks = setup.config, setup.dataset, setup.split, setup.ranks
    confusion = None if evaluation is None else evaluation.confusion
    count, seed = min(config.evaluate.shares_images, len(split.unlabeled)), config.seed
    if confusion is None or not count or dataset.num_classes > MOST_CLASSES:
        return None
    drawn = np.sort(ShuffledOrder(len(split.unlabeled), seed, Stream.SHARES)(0, count))
    outputs = network_logits(
        network,
        cast(np.ndarray, _Readable(select(dataset.unlabeled_pool, split.unlabeled[drawn]))),
        mean=dataset.mean,
        std=dataset.std,
        device=ranks.device,
        batch_size=config.evaluate.batch_size,
        rank=ranks.rank,
        world_size=ranks.world_size,
        between=between,
    )
    predicted = torch.zeros(dataset.num_classes, dtype=torch.int64, device=ranks.device)
    for _, logits in outputs:
        predicted += logits.argmax(dim=1).bincount(minlength=len(predicted))
    predicted = ranks.sum(predicted)
    seen = int(predicted.sum())
    if not seen:
        return None
    counts, unseen = predicted.cpu().numpy(), len(split.unlabeled) - count
    found = estimate_shares(dataset.class_names, confusion.numpy(), counts, seed, unseen)
    return {**found, "unreadable": count - seen}


class _Readable:
    """Images of which a slice leaves out what is damaged or gone."""

    def __init__(self, images: np.ndarray) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, rows: slice) -> np.ndarray:
        return _readable(self._images, rows.start, rows.stop)


def _readable(images: np.ndarray, first: int, end: int) -> np.ndarray:
    """uint8 [n, H, W, 3], without files that are damaged or gone: the training is over, and its
    results must not be lost for one of them."""
    try:
        return images[first:end]
    except UserError:
        if end - first == 1:
            return np.empty((0, *images.shape[1:]), np.uint8)
        middle = (first + end) // 2
        return np.concatenate([_readable(images, first, middle), _readable(images, middle, end)])
