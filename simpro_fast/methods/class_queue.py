"""The last rows of every class, in a table of fixed shape."""

from __future__ import annotations

import torch
from torch import Tensor


def push_rows(queue: Tensor, pushed: Tensor, rows: Tensor, labels: Tensor) -> None:
    """Rows in their order into the queues of their classes: the oldest of a class give way.

    The i-th row that class k ever had is at k * size + i % size. Nothing is read by the host.

    Args:
        queue: [K * size + 1, D], in place; the last row takes what has no place, and is zero.
        pushed: int64 [K], rows that each class has had, in place.
        rows: [n, D]. labels: int64 [n]; a row whose label is no class goes nowhere.
    """
    size = (len(queue) - 1) // len(pushed)
    of_class = (labels[:, None] == torch.arange(len(pushed), device=labels.device)).long()
    place = (of_class.cumsum(0) * of_class).sum(1) - 1  # among the new ones of its class
    total = of_class.sum(0)
    label = labels.clamp(0, len(pushed) - 1)
    stays = (place >= 0) & (place >= total[label] - size)
    slot = label * size + (pushed[label] + place) % size
    queue.index_copy_(0, torch.where(stays, slot, len(queue) - 1), rows)
    queue[-1].zero_()
    pushed += total
