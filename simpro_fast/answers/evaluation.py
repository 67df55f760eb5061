"""Accuracy and calibration on a labeled set, over all ranks; the distance of an estimated prior."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from simpro_fast.answers.estimation.calibration import (
    BINS,
    expected_calibration_error,
    fit_temperature,
)
from simpro_fast.utils.errors import UserError

PRIOR_FLOOR = 1e-6
MISTAKES = 24
"""Most confident mistakes that an evaluation remembers."""
TOP_K = 5
CONFUSION_CLASSES = 2048
"""Most classes for which a confusion matrix is counted (32 MB)."""
TEMPERATURE_NUMBERS = 1 << 23
"""Most logits that the temperature is fitted to (8,388 images of 1,000 classes)."""


@dataclass(frozen=True)
class Evaluation:
    """Counts per class of an evaluation; accuracies are in percent."""

    correct: Tensor
    """int64 [K] on the CPU."""
    count: Tensor
    """int64 [K] on the CPU; at least one image in all."""
    confusion: Tensor | None
    """int64 [K, K] on the CPU, rows true and columns predicted classes; None: K > 2048."""
    top_k_correct: int
    """Images whose class is among the `top_k` most probable."""
    bins: Tensor
    """float64 [3, 15] on the CPU: images, sum of the largest probability, and correct images, by
    that probability in bins of equal width."""
    log_likelihood: float
    """Mean log probability of the true class, nats."""
    temperature: float | None = None
    """Of softmax(f / temperature) with the best likelihood; None: not asked for, or none is."""
    mistakes: Tensor | None = None
    """float64 [4, n] on the CPU, at most `MISTAKES` images that are classified wrongly, the most
    confident first: softmax probability of the predicted class, place in `labels`, label,
    prediction."""

    @property
    def top_k(self) -> int:
        """5, or K where there are fewer classes."""
        return min(TOP_K, len(self.count))

    @property
    def top_k_accuracy(self) -> float:
        """Percent."""
        return 100.0 * self.top_k_correct / int(self.count.sum())

    @property
    def ece(self) -> float:
        """Expected calibration error, 0 to 1."""
        return expected_calibration_error(*self.bins.numpy())

    @property
    def reliability(self) -> list[dict[str, float | None]]:
        """Of every bin: `count`, mean `confidence` and `accuracy` (0 to 1, None without images)."""
        return [
            {
                "count": int(n),
                "confidence": confidence / n if n else None,
                "accuracy": correct / n if n else None,
            }
            for n, confidence, correct in self.bins.T.tolist()
        ]

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


def count_confusions(cells: Tensor, targets: Tensor, predicted: Tensor, num_classes: int) -> None:
    """Add images, int64 [n] each, to the confusion matrix: int64 [K * K], rows true classes."""
    cells.index_add_(0, targets * num_classes + predicted, torch.ones_like(targets))


class Tally:
    """Sums over images of what an `Evaluation` says; nothing waits for the device.

    Args:
        num_classes: K.
        device: of the logits.
    """

    def __init__(self, num_classes: int, device: torch.device | str) -> None:
        self._classes = num_classes
        cells = num_classes**2 if num_classes <= CONFUSION_CLASSES else 0
        # correct and count of every class, top-k hits, then the confusion matrix
        self._counts = torch.zeros(2 * num_classes + 1 + cells, dtype=torch.int64, device=device)
        # the bins row by row, then the log likelihood
        self._sums = torch.zeros(3 * BINS + 1, dtype=torch.float64, device=device)

    def add(self, logits: Tensor, targets: Tensor) -> None:
        """Count images.

        Args:
            logits: [n, K], or log probabilities.
            targets: int64 [n] in 0..K-1, on the same device.
        """
        classes, counts, sums = self._classes, self._counts, self._sums
        logs = logits.double().log_softmax(dim=1)
        predicted, one = logits.argmax(dim=1), torch.ones_like(targets)
        hit = predicted == targets
        among = (logits.topk(min(TOP_K, classes), dim=1).indices == targets[:, None]).any(dim=1)
        counts.index_add_(0, targets, hit.long())
        counts.index_add_(0, targets + classes, one)
        counts[2 * classes] += (among | hit).sum()
        if len(counts) > 2 * classes + 1:
            count_confusions(counts[2 * classes + 1 :], targets, predicted, classes)
        confidence = logs.amax(dim=1).exp()
        place = (confidence * BINS).ceil().long().clamp(1, BINS) - 1
        for row, values in enumerate((one.double(), confidence, hit.double())):
            sums.index_add_(0, place + row * BINS, values)
        sums[3 * BINS] += logs.gather(1, targets[:, None]).sum()

    def reduce(self, process_group: dist.ProcessGroup | None = None) -> None:
        """Sum over the ranks; all must call it."""
        dist.all_reduce(self._counts, group=process_group)
        dist.all_reduce(self._sums, group=process_group)

    def evaluation(self, temperature: float | None = None) -> Evaluation:
        """What the images so far give; at least one."""
        classes, counts, sums = self._classes, self._counts.cpu(), self._sums.cpu()
        correct, count = counts[: 2 * classes].view(2, classes)
        cells = counts[2 * classes + 1 :]
        return Evaluation(
            correct=correct.clone(),
            count=count.clone(),
            confusion=cells.view(classes, classes).clone() if len(cells) else None,
            top_k_correct=int(counts[2 * classes]),
            bins=sums[: 3 * BINS].view(3, BINS),
            log_likelihood=float(sums[-1]) / int(count.sum()),
            temperature=temperature,
        )


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
    temperature: bool = False,
    between: Callable[[], None] | None = None,
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
        temperature: fit it as well, to all images, or to every n-th where there are more than
            `TEMPERATURE_NUMBERS` logits.
        between: see `network_logits`.

    Raises:
        UserError: no images, another number of labels, or a label outside 0..K-1.
    """
    targets = torch.as_tensor(labels, dtype=torch.int64)
    _check(images, targets, num_classes)
    mistakes = ConfidentMistakes(device)
    tally = Tally(num_classes, device)
    every = -(-len(images) * num_classes // TEMPERATURE_NUMBERS)
    kept: list[Tensor] = []
    outputs = network_logits(
        model,
        images,
        mean=mean,
        std=std,
        device=device,
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        between=between,
    )
    for rows, logits in outputs:
        target = targets[rows].to(device)
        tally.add(logits, target)
        mistakes.add(logits, target, rows.start)
        if temperature:
            kept.append(logits[-rows.start % every :: every].float().cpu())
    if world_size > 1:
        tally.reduce(process_group)
        mistakes.reduce(world_size, process_group)
    if not temperature:
        return replace(tally.evaluation(), mistakes=mistakes.found())

    def total(mine: float) -> float:
        if world_size == 1:
            return mine
        value = torch.tensor([mine], dtype=torch.float64, device=device)
        dist.all_reduce(value, group=process_group)
        return float(value)

    start, end = share_of(len(images), rank, world_size)
    places = range(start + -start % every, end, every)
    logits = torch.cat(kept) if kept else torch.zeros(0, num_classes)
    fitted = fit_temperature(logits.numpy(), targets[list(places)].numpy(), total)
    return replace(tally.evaluation(fitted), mistakes=mistakes.found())


def share_of(count: int, rank: int, world_size: int) -> tuple[int, int]:
    """Half-open range of the images, of `count`, that are this rank's."""
    return count * rank // world_size, count * (rank + 1) // world_size


@torch.no_grad()
def network_logits(
    network: nn.Module,
    images: np.ndarray | Tensor,
    *,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    between: Callable[[], None] | None = None,
) -> Iterator[tuple[slice, Tensor]]:
    """Run a network in evaluation mode over this rank's share of the images; its mode is restored.

    Args:
        network: from float [n, 3, H, W] of its weights' dtype to logits [n, K], on `device`.
        images: uint8 [n, H, W, 3]; only slices of it are taken, a batch at a time. A slice may
            give fewer images than asked for, where some cannot be read.
        mean, std: per channel, on the 0..1 scale.
        between: called before every batch, equally often on every rank, so that it may hold a
            collective; what it raises ends the loop.

    Yields:
        places in `images`, and the logits of what is there.
    """
    start, end = share_of(len(images), rank, world_size)
    largest = math.ceil(len(images) / world_size)
    rounds = math.ceil(largest / batch_size)
    dtype = next((p.dtype for p in network.parameters()), torch.float32)
    was_training = network.training
    network.eval()
    try:
        for first in range(start, start + rounds * batch_size, batch_size):
            if between is not None:
                between()
            rows = slice(min(first, end), min(first + batch_size, end))
            if rows.start == rows.stop:
                continue
            pixels = torch.as_tensor(images[rows])
            if len(pixels):
                yield rows, network(network_input(pixels.to(device), mean, std, dtype))
    finally:
        network.train(was_training)


def network_input(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float], dtype: torch.dtype
) -> Tensor:
    """Normalised views [n, 3, H, W] in channels_last, of pixels uint8 [n, H, W, 3] on any device.

    Cached features float16 [n, D] in place of pixels are only converted.

    Evaluation and prediction share it, so that they see the same numbers.

    Args:
        mean, std: per channel, on the 0..1 scale.
        dtype: of the network's weights.
    """
    if pixels.ndim == 2:
        return pixels.to(dtype)
    offset, scale = (
        torch.tensor(values, dtype=dtype, device=pixels.device).view(1, 3, 1, 1) * 255
        for values in (mean, std)
    )
    # The permuted view of NHWC pixels is channels_last as it stands.
    return pixels.permute(0, 3, 1, 2).to(dtype).sub_(offset).div_(scale)


def _check(images: np.ndarray | Tensor, labels: Tensor, num_classes: int) -> None:
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
    per_class: Sequence[float | None], train_counts: Sequence[int]
) -> dict[str, float | None]:
    """Mean accuracy of the classes with many (above 100), medium and few (below 20) labeled images.

    Args:
        per_class: accuracy per class in percent; None entries are left out.
        train_counts: labeled training images per class.

    Returns:
        `many`, `medium`, `few` in percent; None for a group without a class.
    """
    groups: dict[str, list[float]] = {"many": [], "medium": [], "few": []}
    for accuracy, count in zip(per_class, train_counts, strict=True):
        if accuracy is not None:
            name = "many" if count > 100 else "few" if count < 20 else "medium"
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
