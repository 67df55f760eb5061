"""The loader that feeds training: draws on the host, a DALI pipeline that turns them into views."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from simpro_fast.config.data import DataConfig
from simpro_fast.data.augment.views import ViewMaker, join_plans, make_views, view_plan
from simpro_fast.data.batch import AugmentConfig, Batch, BatchLayout, StepCounter
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.pipeline.dali import build_pipeline
from simpro_fast.data.pipeline.image_store import ImageStore
from simpro_fast.data.sampling.draws import StepSampler
from simpro_fast.data.sampling.labeled_order import labeled_order
from simpro_fast.data.splits.split import Split
from simpro_fast.errors import UserError

PIXELS_PER_THREAD = 2**19
"""Of the views of a step on a CPU. With fewer, sharing costs more processor time than it is worth
beside training, which has a use for every core."""


@dataclass(frozen=True)
class _Labels:
    """Labels of a step whose views the pipeline makes."""

    step: int
    targets: np.ndarray
    truth: np.ndarray


class ArrayLoader:
    """One rank's batches through DALI; implements `loader.Loader`.

    The pipeline works up to `data.prefetch` steps ahead and in its own thread, where it calls
    `_make_views`. That counts its own steps, starting at `start_step`; labels wait in a queue until
    the views of their step come out.
    """

    def __init__(
        self,
        data: DataConfig,
        dataset: ArrayDataset,
        split: Split,
        *,
        layout: BatchLayout,
        augment: AugmentConfig,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        start_step: int,
        num_threads: int,
    ) -> None:
        self._dataset, self._split = dataset, split
        self._layout, self._augment = layout, augment
        self._device = device
        self._draws = StepSampler(
            seed=seed,
            labeled_order=labeled_order(
                data, dataset.labels[split.labeled], dataset.num_classes, seed
            ),
            num_unlabeled=len(split.unlabeled),
            labeled=layout.labeled,
            unlabeled=layout.unlabeled,
            labeled_views=layout.labeled_views,
            strong_views=layout.strong_views,
            rank=rank,
            world_size=world_size,
            augment=augment,
        )
        self._counter = StepCounter(start_step)
        self._next_made = start_step
        self._labels: deque[_Labels] = deque()
        self._failure: str | None = None
        # torch fixes the pool size of a thread at its first use. Do it for this one before the
        # threads of the pipeline choose theirs, which would otherwise become its default.
        torch.get_num_threads()
        self._resident: ImageStore | None = ImageStore(
            dataset, split, device=device, resident=data.resident
        )
        rows = layout.rows
        threads = min(num_threads, rows * augment.image_size**2 // PIXELS_PER_THREAD)
        shared = device.type == "cpu" and threads > 1
        self._maker = ViewMaker(threads) if shared else None
        # The pipeline's own threads share the views by whole samples, of equal sizes.
        self._parts = max(n for n in range(1, threads + 1) if rows % n == 0) if shared else 1
        self._pipe: Any = build_pipeline(
            self._make_views,
            parts=self._parts,
            augment=augment,
            device=device,
            num_threads=num_threads,
            prefetch=data.prefetch,
        )

    def next(self, step: int) -> Batch:
        if self._pipe is None:
            raise UserError(f"data of step {step}: {self._failure or 'the loader is closed'}")
        self._counter.take(step)
        views = self._run(step)
        labels = self._labels.popleft()
        if labels.step != step:
            raise RuntimeError(f"views of step {step} met the labels of step {labels.step}")
        return Batch(
            step=step,
            views=views.permute(0, 3, 1, 2),
            targets=torch.from_numpy(labels.targets).to(self._device, non_blocking=True),
            truth=torch.from_numpy(labels.truth).to(self._device, non_blocking=True),
        )

    def _run(self, step: int) -> torch.Tensor:
        """Run the pipeline: float32 [rows, H, W, 3]."""
        try:
            if self._device.type == "cuda":
                (output,) = self._pipe.run(torch.cuda.current_stream(self._device))
            else:
                (output,) = self._pipe.run()
            return torch.from_dlpack(output.as_tensor()).flatten(0, 1)
        except Exception as error:
            reason = self._failure or failure_reason(error)
            self.close()
            self._failure = reason
            raise UserError(f"data of step {step}: {reason}") from error

    def describe(self, step: int) -> dict[str, Any]:
        draws = self._draws(step)
        return {
            "step": step,
            "labeled": self._split.labeled[draws.labeled_positions].tolist(),
            "unlabeled": self._split.unlabeled[draws.unlabeled_positions].tolist(),
            "labeled_views": draws.labeled_views.as_lists(),
            "unlabeled_views": draws.unlabeled_views.as_lists(),
        }

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        del pipe  # the last reference: its threads end here
        self._resident = None
        if self._maker is not None:
            self._maker.close()

    def __del__(self) -> None:
        if getattr(self, "_pipe", None) is not None:
            self.close()

    def _make_views(self) -> list[torch.Tensor]:
        """Views uint8 of the next step, rows in the order of `Batch.views`, in equal parts."""
        step, layout, augment = self._next_made, self._layout, self._augment
        try:
            draws = self._draws(step)
            labeled = view_plan(draws.labeled_views, layout.labeled, augment)
            unlabeled = view_plan(draws.unlabeled_views, layout.unlabeled, augment)
            dataset_rows = self._split.unlabeled[draws.unlabeled_positions]
            labels = _Labels(
                step=step,
                targets=self._dataset.labels[self._split.labeled[draws.labeled_positions]],
                truth=self._dataset.unlabeled_truth(dataset_rows),
            )
        except Exception as error:
            self._failure = f"the draws of step {step} failed: {error}"
            raise
        self._labels.append(labels)
        self._next_made += 1
        assert self._resident is not None  # it outlives the pipeline
        images = self._resident.gather(draws.labeled_positions, draws.unlabeled_positions)
        plan = join_plans([labeled, unlabeled], [0, layout.labeled])
        make = self._maker or make_views
        return list(make(images, plan, max_shift=augment.max_shift).chunk(self._parts))


def failure_reason(error: Exception) -> str:
    """The line of a DALI error that says what happened; the rest stays in the exception's cause."""
    text = str(error).rpartition("encountered:")[2]
    return next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
