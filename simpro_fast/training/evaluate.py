"""What the EMA network of a run says: of the test images, and of the unlabeled ones as a whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import select
from simpro_fast.data.sampling.draws import ShuffledOrder, Stream
from simpro_fast.errors import UserError
from simpro_fast.estimation.bayesian import bayesian_shares
from simpro_fast.evaluation import Evaluation, evaluate, network_input
from simpro_fast.training.setup import Setup

MOST_CLASSES = 200
"""Beyond, sampling takes minutes; `simpro-fast heap` does it when it is asked to."""
ENOUGH_R_HAT = 1.05
"""A second of sampling at the end of a run; `simpro-fast heap` takes longer."""


def evaluate_split(
    network: nn.Module, setup: Setup, *, temperature: bool = False
) -> Evaluation | None:
    """Accuracy over all ranks, equal on each of them; None without test images."""
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
    )


def estimate_shares(
    network: nn.Module, setup: Setup, evaluation: Evaluation | None
) -> dict[str, Any] | None:
    """Class shares of the unlabeled images with 95 % intervals, equal on all ranks.

    From the classes that the network predicts for at most `evaluate.heap_images` of them, drawn by
    the seed and shared among the ranks, and from the confusion matrix of the test.

    Returns:
        `heap` of summary.json; None without a confusion matrix or any image to look at, or with
        more than MOST_CLASSES classes.
    """
    config, dataset, split, ranks = setup.config, setup.dataset, setup.split, setup.ranks
    confusion = None if evaluation is None else evaluation.confusion
    count, seed = min(config.evaluate.heap_images, len(split.unlabeled)), config.seed
    if confusion is None or not count or dataset.num_classes > MOST_CLASSES:
        return None
    drawn = np.sort(ShuffledOrder(len(split.unlabeled), seed, Stream.HEAP)(0, count))
    mine = split.unlabeled[drawn[ranks.rank :: ranks.world_size]]
    images = select(dataset.unlabeled_pool, mine)
    size = config.evaluate.batch_size
    predicted = ranks.sum(_predicted_counts(network, images, dataset, ranks.device, size))
    seen = int(predicted.sum())
    if not seen:
        return None
    found = bayesian_shares(
        confusion.numpy(), predicted.cpu().numpy(), seed=seed, enough_r_hat=ENOUGH_R_HAT
    )
    columns = zip(dataset.class_names, found.estimate, found.low, found.high, strict=True)
    return {
        "method": "bayesian",
        "images": seen,
        "unreadable": count - seen,
        "converged": found.converged,
        "rows": [
            {"class": name, "estimate": float(share), "low": float(low), "high": float(high)}
            for name, share, low, high in columns
        ],
    }


@torch.no_grad()
def _predicted_counts(
    network: nn.Module,
    images: np.ndarray,
    dataset: ArrayDataset,
    device: torch.device,
    batch_size: int,
) -> torch.Tensor:
    """int64 [K] on the device: images by argmax f(x), the rule of the test."""
    counts = torch.zeros(dataset.num_classes, dtype=torch.int64, device=device)
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    was_training = network.training
    network.eval()
    for first in range(0, len(images), batch_size):
        pixels = _readable(images, first, min(first + batch_size, len(images)))
        views = network_input(torch.as_tensor(pixels).to(device), dataset.mean, dataset.std, dtype)
        if len(views):
            counts += network(views).argmax(dim=1).bincount(minlength=len(counts))
    network.train(was_training)
    return counts


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
