"""What a run must not lose besides weights and priors, and counts that belong to one rank each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from simpro_fast.distributed.process_group import Ranks


@dataclass
class History:
    """What a run remembers of its evaluations, part of every checkpoint."""

    top1: list[float] = field(default_factory=list)
    """Of every evaluation so far, percent; the last 20 make `top1_mean_last20`."""
    seconds: float = 0.0
    """Wall time of all processes that worked on this run."""


def gather_counts(counts: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Tensors of this rank as one row of a matrix [world_size, n]; every rank calls it."""
    return ranks.gather(torch.cat([count.flatten() for count in counts]))


def scatter_counts(saved: Tensor, counts: Sequence[Tensor], ranks: Ranks) -> None:
    """Restore what `gather_counts` returned, from any number of ranks.

    Each rank goes on with its own counts; among another number of ranks, rank 0 with all. Early
    versions did not have the last of them: it begins anew.
    """
    rows = saved.to(ranks.device)
    mine = rows[ranks.rank] if len(rows) == ranks.world_size else rows.sum(0) * ranks.is_main
    if len(mine) == sum(count.numel() for count in counts[:-1]):
        mine = torch.cat([mine, torch.zeros_like(counts[-1]).flatten()])
    for target, part in zip(counts, mine.split([c.numel() for c in counts]), strict=True):
        target.copy_(part.view_as(target))
