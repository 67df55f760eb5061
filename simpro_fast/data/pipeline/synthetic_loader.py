"""Batches made of nothing: for benches, and for machines without DALI."""

from __future__ import annotations

from typing import Any

import torch

from simpro_fast.data.batch import Batch, LoaderSettings, StepCounter
from simpro_fast.data.datasets.base import ArrayDataset


class SyntheticLoader:
    """The same random batch at every step, on the device; built as `build_loader` is called.

    Views are standard normal, labels uniform; both are functions of the seed alone. Positions count
    from 0.
    """

    def __init__(self, settings: LoaderSettings, dataset: ArrayDataset, split: object) -> None:
        device, layout, side = settings.device, settings.layout, dataset.image_size
        generator = torch.Generator().manual_seed(settings.seed)
        views = torch.randn(layout.rows, 3, side, side, generator=generator)
        self._views = views.to(device).contiguous(memory_format=torch.channels_last)
        sizes = [layout.labeled, layout.unlabeled]
        labels = torch.randint(dataset.num_classes, (sum(sizes),), generator=generator)
        self._targets, self._truth = labels.to(device).split(sizes)
        self._positions = [torch.arange(size, device=device) for size in sizes]
        self._counter = StepCounter(settings.start_step)

    def next(self, step: int) -> Batch:
        self._counter.take(step)
        return Batch(step, self._views, self._targets, self._truth, *self._positions)

    def describe(self, step: int) -> dict[str, Any]:
        return {"step": step, "synthetic": True}

    def close(self) -> None:
        pass
