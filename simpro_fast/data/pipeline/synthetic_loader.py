"""Batches made of nothing: for benches, and for machines without DALI."""

from __future__ import annotations

from typing import Any

import torch

from simpro_fast.data.batch import Batch, BatchLayout, StepCounter


class SyntheticLoader:
    """The same random batch at every step.

    Views are standard normal, labels uniform; both are functions of `seed` alone. Positions count
    from 0.
    """

    def __init__(
        self,
        layout: BatchLayout,
        *,
        image_size: int,
        num_classes: int,
        device: torch.device,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        views = torch.randn(layout.rows, 3, image_size, image_size, generator=generator)
        self._views = views.to(device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(
            num_classes, (layout.labeled + layout.unlabeled,), generator=generator
        ).to(device)
        self._targets, self._truth = labels.split([layout.labeled, layout.unlabeled])
        self._positions = [
            torch.arange(count, device=device) for count in (layout.labeled, layout.unlabeled)
        ]
        self._counter = StepCounter(start_step)

    def next(self, step: int) -> Batch:
        self._counter.take(step)
        return Batch(step, self._views, self._targets, self._truth, *self._positions)

    def describe(self, step: int) -> dict[str, Any]:
        return {"step": step, "synthetic": True}

    def close(self) -> None:
        pass
