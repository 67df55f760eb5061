"""Accuracy on a labeled set, over all ranks, and how far an estimated prior is from the truth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpro_fast.errors import UserError

PRIOR_FLOOR = 1e-6
MISTAKES = 24
"""Most confident mistakes that an evaluation remembers."""


@dataclass(frozen=True)
class Evaluation:
    """Counts per class of an evaluation; accuracies are in percent."""

    correct: Tensor
    """int64 [K] on the CPU."""
    count: Tensor
    """int64 [K] on the CPU; at least one image in all."""
    mistakes: Tensor | None = None
    """float64 [4, n] on the CPU, at most `MISTAKES` images that are classified wrongly, the most
    confident first: softmax probability of the predicted class, place in `labels`, label,
    prediction."""

    @property
    def top1(self) -> float:
        """Share of all images that is classified correctly."""
        return 100.0 * int(self.correct.sum()) / int(self.count.sum())

    @property
    def per_class(self) -> list[float | None]:
        """Recall of every class; None for a class without images."""
        pairs = zip(self.correct.tolist(), self.count.tolist(), strict=True)
        return [100.0 * correct / count if count else None for correct, count in pairs]

    @property
    def top1_class_mean(self) -> float:
        """Mean recall of the classes that have images."""
        present = [accuracy for accuracy in self.per_class if accuracy is not None]
        return sum(present) / len(present)


class ConfidentMistakes:
    """The `MISTAKES` most confident mistakes of an evaluation; nothing waits for the device."""

    def __init__(self, device: torch.device | str) -> None:
        # probability (-1: no mistake), place, label, prediction
        self._rows = torch.zeros(4, 0, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, targets: Tensor, first: int) -> None:
        """Look at images.

        Args:
            logits: [n, K].
            targets: int64 [n] in 0..K-1, on the same device.
            first: place of the first of them.
        """
        predicted = logits.argmax(dim=1)
        probability = logits.softmax(dim=1, dtype=torch.float32).amax(dim=1).double()
        places = torch.arange(first, first + len(targets), device=logits.device)
        wrong = probability.masked_fill(predicted == targets, -1.0)
        found = torch.stack([wrong, *(row.double() for row in (places, targets, predicted))])
        self._keep(torch.cat([self._rows, found], dim=1))

    def reduce(self, world_size: int, process_group: dist.ProcessGroup | None = None) -> None:
        """Put those of all ranks together; all must call it."""
        padded = nn.functional.pad(self._rows, (0, MISTAKES - self._rows.shape[1]), value=-1.0)
        parts = [torch.empty_like(padded) for _ in range(world_size)]
        dist.all_gather(parts, padded, group=process_group)
        self._keep(torch.cat(parts, dim=1))

    def found(self) -> Tensor:
        """As in `Evaluation.mistakes`."""
        rows = self._rows.cpu()
        return rows[:, rows[0] >= 0]

    def _keep(self, rows: Tensor) -> None:
        order = rows[0].argsort(descending=True, stable=True)[:MISTAKES]
        self._rows = rows[:, order].contiguous()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    images: np.ndarray | Tensor,
    labels: np.ndarray | Tensor | Sequence[int],
    *,
    mean: Sequence[float],
    std: Sequence[float],
    num_classes: int,
    device: torch.device | str,
    batch_size: int = 512,
    rank: int = 0,
    world_size: int = 1,
    process_group: dist.ProcessGroup | None = None,
) -> Evaluation:
    """Classify by argmax f(x), without logit adjustment (the paper's test rule), and count.

    Each rank takes its share of the images, so that every image counts once whatever the number of
    ranks; all ranks must call it and get the same result. The model's mode is restored.

    Args:
        model: from float [n, 3, H, W] of its weights' dtype to logits [n, K], on `device`.
        images: uint8 [n, H, W, 3]; only slices of it are taken, a batch at a time.
        labels: integers [n] in 0..K-1.
        mean, std: per channel, on the 0..1 scale.
        num_classes: K.
        device: of the model; images are moved batch by batch.
        batch_size: images per forward pass on each rank.
        rank, world_size: this rank's place among those that share the work.
        process_group: those ranks; None: all.

    Raises:
        UserError: no images, another number of labels, or a label outside 0..K-1.
    """
    targets = torch.as_tensor(labels, dtype=torch.int64)
    _check(images, targets, num_classes)
    start, end = len(images) * rank // world_size, len(images) * (rank + 1) // world_size
    dtype = next((p.dtype for p in model.parameters()), torch.float32)

    counts = torch.zeros(2, num_classes, dtype=torch.int64, device=device)
    mistakes = ConfidentMistakes(device)
    was_training = model.training
    model.eval()
    for first in range(start, end, batch_size):
        rows = slice(first, min(first + batch_size, end))
        views = network_input(torch.as_tensor(images[rows]).to(device), mean, std, dtype)
        target = targets[rows].to(device)
        logits = model(views)
        hit = logits.argmax(dim=1) == target
        counts[0].index_add_(0, target, hit.long())
        counts[1].index_add_(0, target, torch.ones_like(target))
        mistakes.add(logits, target, first)
    model.train(was_training)
    if world_size > 1:
        dist.all_reduce(counts, group=process_group)
        mistakes.reduce(world_size, process_group)
    correct, count = counts.cpu().unbind()
    return Evaluation(correct, count, mistakes.found())


def network_input(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Normalised views [n, 3, H, W] in channels_last, of pixels uint8 [n, H, W, 3] on any device.

    Evaluation and prediction share it, so that they see the same numbers.

    Args:
        mean, std: per channel, on the 0..1 scale.
        dtype: of the network's weights.
    """
    offset, scale = (
        torch.tensor(values, dtype=dtype, device=pixels.device).view(1, 3, 1, 1) * 255
        for values in (mean, std)
    )
    # The permuted view of NHWC pixels is channels_last as it stands.
    return pixels.permute(0, 3, 1, 2).to(dtype).sub_(offset).div_(scale)


def _check(images: np.ndarray | Tensor, labels: Tensor, num_classes: int) -> None:
    uint8 = str(images.dtype).removeprefix("torch.") == "uint8"
    if not uint8 or images.ndim != 4 or images.shape[3] != 3:
        raise ValueError(
            f"images must be uint8 [n, H, W, 3], got {images.dtype} {list(images.shape)}"
        )
    if len(images) == 0:
        raise UserError("there is no image to evaluate; give the run a test set")
    if tuple(labels.shape) != tuple(images.shape[:1]):
        raise UserError(f"{len(images)} images need as many labels, got {list(labels.shape)}")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= num_classes:
        raise UserError(
            f"test labels must be 0 to {num_classes - 1} ({num_classes} classes), "
            f"got {low if low < 0 else high}"
        )


def many_medium_few(
    per_class: Sequence[float | None],
    train_counts: Sequence[int],
    *,
    many_above: int = 100,
    few_below: int = 20,
) -> dict[str, float | None]:
    """Mean accuracy of the classes with many, a medium number of, and few labeled images.

    Args:
        per_class: accuracy per class in percent; None entries are left out.
        train_counts: labeled training images per class.
        many_above, few_below: many is more than the one, few is fewer than the other, the usual
            100 and 20; medium is the rest, both bounds included.

    Returns:
        `many`, `medium`, `few` in percent; None for a group without a class.
    """
    groups: dict[str, list[float]] = {"many": [], "medium": [], "few": []}
    for accuracy, count in zip(per_class, train_counts, strict=True):
        if accuracy is not None:
            name = "many" if count > many_above else "few" if count < few_below else "medium"
            groups[name].append(accuracy)
    return {name: sum(part) / len(part) if part else None for name, part in groups.items()}


def kl_divergence(true_counts: Sequence[int] | Tensor, estimate: Sequence[float] | Tensor) -> float:
    """KL(true || estimate) in nats, with the moving average as the estimate where it is logged.

    The released code logs another number: the symmetrised divergence of each period's own counts.

    Args:
        true_counts: images per class, [K]; classes without images add nothing.
        estimate: [K], of any positive sum; normalised, floored at 1e-6 (an estimate of 0 for a
            class that occurs would be infinitely far) and normalised again.
    """
    truth = torch.as_tensor(true_counts, dtype=torch.float64).cpu()
    prior = torch.as_tensor(estimate, dtype=torch.float64).cpu()
    floored = (prior / prior.sum()).clamp_min(PRIOR_FLOOR)
    truth, floored = truth / truth.sum(), floored / floored.sum()
    divergence = torch.special.xlogy(truth, truth) - torch.special.xlogy(truth, floored)
    return max(0.0, math.fsum(divergence.tolist()))
