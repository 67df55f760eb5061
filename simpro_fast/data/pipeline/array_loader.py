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
"""Of the views of a fetch on a CPU. With fewer, sharing costs more processor time than it is worth
beside training, which has a use for every core."""


@dataclass(frozen=True)
class _Labels:
    """Labels of a step whose views the pipeline makes."""

    step: int
    targets: np.ndarray
    truth: np.ndarray


class ArrayLoader:
    """One rank's batches through DALI; implements `loader.Loader`.

    The pipeline works up to `data.prefetch` runs ahead and in its own thread, where it calls
    `_make_views` for the next `data.steps_per_fetch` steps. That counts its own steps, starting at
    `start_step`; labels wait in a queue until the views of their step come out.
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
        self._steps_per_fetch = data.steps_per_fetch
        self._next_made = start_step
        self._labels: deque[_Labels] = deque()
        self._fetched: deque[torch.Tensor] = deque()
        self._failure: str | None = None
        # torch fixes the pool size of a thread at its first use. Do it for this one before the
        # threads of the pipeline choose theirs, which would otherwise become its default.
        torch.get_num_threads()
        self._resident: ImageStore | None = ImageStore(
            dataset, split, device=device, resident=data.resident
        )
        rows = layout.rows * data.steps_per_fetch
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
        if not self._fetched:
            self._fetch(step)
        labels = self._labels.popleft()
        if labels.step != step:
            raise RuntimeError(f"views of step {step} met the labels of step {labels.step}")
        return Batch(
            step=step,
            views=self._fetched.popleft().permute(0, 3, 1, 2),
            targets=torch.from_numpy(labels.targets).to(self._device, non_blocking=True),
            truth=torch.from_numpy(labels.truth).to(self._device, non_blocking=True),
        )

    def _fetch(self, step: int) -> None:
        """Run the pipeline: float32 [rows, H, W, 3] of each of the next steps."""
        try:
            if self._device.type == "cuda":
                (output,) = self._pipe.run(torch.cuda.current_stream(self._device))
            else:
                (output,) = self._pipe.run()
            views = torch.from_dlpack(output.as_tensor()).flatten(0, 1)
        except Exception as error:
            reason = self._failure or failure_reason(error)
            self.close()
            self._failure = reason
            raise UserError(f"data of step {step}: {reason}") from error
        self._fetched.extend(views.split(self._layout.rows))

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
        """Views uint8 of the next steps, rows in the order of `Batch.views`, in equal parts."""
        layout, steps = self._layout, self._steps_per_fetch
        fetched, tables, starts = [], [], []
        for i in range(steps):
            step = self._next_made
            try:
                draws = self._draws(step)
                tables.append(view_plan(draws.labeled_views, layout.labeled, self._augment))
                tables.append(view_plan(draws.unlabeled_views, layout.unlabeled, self._augment))
                labels = _Labels(
                    step=step,
                    targets=self._dataset.labels[self._split.labeled[draws.labeled_positions]],
                    truth=self._dataset.unlabeled_truth(
                        self._split.unlabeled[draws.unlabeled_positions]
                    ),
                )
            except Exception as error:
                self._failure = f"the draws of step {step} failed: {error}"
                raise
            # The images of all steps come together, labeled ones first.
            starts += [i * layout.labeled, steps * layout.labeled + i * layout.unlabeled]
            fetched.append(draws)
            self._labels.append(labels)
            self._next_made += 1
        assert self._resident is not None  # it outlives the pipeline
        images = self._resident.gather(
            np.concatenate([draws.labeled_positions for draws in fetched]),
            np.concatenate([draws.unlabeled_positions for draws in fetched]),
        )
        make = self._maker or make_views
        made = make(images, join_plans(tables, starts), max_shift=self._augment.max_shift)
        return list(made.chunk(self._parts))


def failure_reason(error: Exception) -> str:
    """The line of a DALI error that says what happened; the rest stays in the exception's cause."""
    text = str(error).rpartition("encountered:")[2]
    return next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
