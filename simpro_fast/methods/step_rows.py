"""Rows that the forward passes of a step leave for its end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn


class StepRows(nn.Module):
    """Rows of this rank's images of a step, in the order of its batch, whatever its micro-batches.

    The buffers have a fixed shape and are written in place, so that `add` can be compiled and
    captured in a CUDA graph. They are no part of the state: between two steps they hold nothing.

    Args:
        images: of a step over all ranks; ranks share them equally.
        group: these ranks; None: all.
        rows: by name one row, from which shape and type are taken; of each name there are as many
            as this rank has images, at first copies of this one.
    """

    used: Tensor

    def __init__(self, images: int, group: dist.ProcessGroup | None, **rows: Tensor) -> None:
        super().__init__()
        if dist.is_available() and dist.is_initialized():
            images //= dist.get_world_size(group)
        for name, row in rows.items():
            repeated = row.expand(images, *row.shape).clone()
            self.register_buffer(name, repeated, persistent=False)
        self.register_buffer("used", torch.zeros((), dtype=torch.int64), persistent=False)

    def __getitem__(self, name: str) -> Tensor:
        """All rows of this name, once those of the step are there."""
        return self.get_buffer(name)

    @torch.no_grad()
    def add(self, **rows: Tensor) -> None:
        """Those of the next micro-batch, as many of each name."""
        count = len(next(iter(rows.values())))
        places = self.used + torch.arange(count, device=self.used.device)
        for name, values in rows.items():
            self[name].index_copy_(0, places, values.detach().to(self[name].dtype))
        self.used.add_(count)

    def clear(self) -> None:
        """The next rows are those of another step."""
        self.used.zero_()


def last_of_each(positions: Tensor, nowhere: int) -> Tensor:
    """Positions int64 [n] with `nowhere` in place of all but the last of equal ones.

    An image may come twice in a step, where two passes over the data meet; a scatter with such
    positions would leave open which of its rows stays.
    """
    again = (positions[:, None] == positions).triu(1).any(1)
    return torch.where(again, nowhere, positions)
