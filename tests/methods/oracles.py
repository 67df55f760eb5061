"""What several methods' oracles share, written out row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor


def softmax(row: Sequence[float]) -> list[float]:
    """Of one row of logits."""
    weights = [math.exp(v - max(row)) for v in row]
    return [w / sum(weights) for w in weights]


def labeled_loss(given: dict[str, Tensor]) -> float:
    """Mean cross entropy of view-major rows of `logits_labeled` towards `targets`."""
    rows, targets = given["logits_labeled"].tolist(), given["targets"].tolist()
    terms = [-math.log(softmax(row)[targets[i % len(targets)]]) for i, row in enumerate(rows)]
    return sum(terms) / len(rows)


def hard_loss(logits_strong: Tensor, labels: Sequence[int], mask: Sequence[bool]) -> float:
    """Cross entropy of view-major rows towards the labels of kept images, over all rows."""
    rows, n = logits_strong.tolist(), len(labels)
    terms = [-math.log(softmax(row)[labels[i % n]]) for i, row in enumerate(rows) if mask[i % n]]
    return sum(terms) / len(rows)


def micro_batches(given: dict[str, Tensor], parts: int) -> Iterator[dict[str, Tensor]]:
    """The arguments of a step in `parts` micro-batches; all rows are view-major."""
    labeled, unlabeled = len(given["targets"]), len(given["logits_weak"])
    for part in range(parts):
        small = {}
        for name, rows in given.items():
            of_labeled = name in ("targets", "labeled_positions") or name.endswith("_labeled")
            images = labeled if of_labeled else unlabeled
            views, size = rows.view(-1, images, *rows.shape[1:]), images // parts
            small[name] = views[:, part * size : (part + 1) * size].flatten(0, 1)
        yield small
