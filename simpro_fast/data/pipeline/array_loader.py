"""The loader that feeds training: draws on the host, a DALI pipeline that turns them into views."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from simpro_kernels.augment.op import MAX_PIXELS
from simpro_kernels.augment.operations import IMAGE

from simpro_fast.data.augment.views import EagerViews, FusedViews, view_plan
from simpro_fast.data.batch import AugmentConfig, Batch, LoaderSettings, StepCounter
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.pipeline.dali import build_pipeline
from simpro_fast.data.pipeline.image_store import ImageStore
from simpro_fast.data.pipeline.outputs import Outputs
from simpro_fast.data.sampling.draws import StepDraws, StepSampler
from simpro_fast.data.sampling.labeled_order import labeled_order
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import UserError

PIXELS_PER_THREAD = 2**19
"""Pixels of a step's views on a CPU. With fewer, sharing costs more processor time than it is worth
beside training, which has a use for every core."""


@dataclass(frozen=True)
class _Labels:
    """Labels of a step whose views the pipeline makes."""

    step: int
    labels: torch.Tensor
    """int64 [2 (b + m)] on the host, targets, truth, positions of a `Batch`; pinned for a GPU."""


class ArrayLoader:
    """One rank's batches through DALI; implements `data.batch.Loader`.

    The pipeline works up to `data.prefetch` steps ahead and in its own thread, where it calls
    `_make_views`. That counts its own steps, starting at `start_step`; labels wait in a queue until
    the views of their step come out.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        dataset: ArrayDataset,
        split: Split,
        augment: AugmentConfig,
    ) -> None:
        data, device = settings.data, settings.device
        self._dataset, self._split = dataset, split
        self._layout, self._augment = settings.layout, augment
        self._device = device
        self._targets = split.targets(dataset)
        self._draws = StepSampler(
            settings,
            labeled_order(data, self._targets, dataset.num_classes, settings.seed),
            num_unlabeled=len(split.unlabeled),
            augment=augment,
        )
        self._counter = StepCounter(settings.start_step)
        self._next_made = settings.start_step
        self._labels: deque[_Labels] = deque()
        self._failure: str | None = None
        # torch fixes the pool size of a thread at its first use. Do it for this one before the
        # threads of the pipeline choose theirs, which would otherwise become its default.
        torch.get_num_threads()
        self._resident: ImageStore | None = ImageStore(
            dataset, split, device=device, resident=data.resident
        )
        self._maker = view_maker(settings, augment)
        self._outputs = Outputs(device)
        self._pipe: Any = build_pipeline(
            self._make_views,
            parts=self._maker.parts,
            normalised=self._maker.normalised,
            augment=augment,
            device=device,
            num_threads=settings.num_threads,
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
        sent = labels.labels.to(self._device, non_blocking=True)
        sizes = [self._layout.labeled, self._layout.unlabeled]
        return Batch(step, views.permute(0, 3, 1, 2), *sent.split(2 * sizes))

    def _run(self, step: int) -> torch.Tensor:
        """Run the pipeline: [rows, H, W, 3]."""
        try:
            (views,) = self._outputs.run(self._pipe)
            return self._maker.received(views).flatten(0, 1)
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
        self._outputs.close()
        pipe, self._pipe = self._pipe, None
        del pipe  # the last reference: its threads end here
        self._resident = None
        self._maker.close()

    def __del__(self) -> None:
        if getattr(self, "_pipe", None) is not None:
            self.close()

    def _make_views(self) -> list[torch.Tensor]:
        """Views of the next step, in the order of `Batch.views`, in equal parts."""
        step, augment = self._next_made, self._augment
        try:
            draws = self._draws(step)
            places = np.arange(self._layout.labeled + self._layout.unlabeled)
            labeled, unlabeled = np.split(places, [self._layout.labeled])
            plan = np.concatenate(
                [
                    view_plan(draws.labeled_views, labeled, augment),
                    view_plan(draws.unlabeled_views, unlabeled, augment),
                ]
            )
            labels = self._labels_of(draws)
        except Exception as error:
            self._failure = f"the draws of step {step} failed: {error}"
            raise
        self._labels.append(_Labels(step, labels))
        self._next_made += 1
        assert self._resident is not None  # it outlives the pipeline
        images, device_rows = self._resident.gather(
            draws.labeled_positions, draws.unlabeled_positions
        )
        plan[:, IMAGE] = device_rows[plan[:, IMAGE]]
        return self._maker(images, plan)

    def _labels_of(self, draws: StepDraws) -> torch.Tensor:
        unlabeled_rows = self._split.unlabeled[draws.unlabeled_positions]
        truth = self._dataset.unlabeled_truth(unlabeled_rows)
        positions = draws.labeled_positions, draws.unlabeled_positions
        labels = torch.from_numpy(
            np.concatenate([self._targets[draws.labeled_positions], truth, *positions])
        )
        return labels.pin_memory() if self._device.type == "cuda" else labels


def view_maker(settings: LoaderSettings, augment: AugmentConfig) -> EagerViews | FusedViews:
    """Return what makes the views of a step."""
    if settings.device.type == "cuda":
        if augment.image_size**2 <= MAX_PIXELS:
            return FusedViews(augment, settings.dtype)
        return EagerViews(augment, threads=1, parts=1)
    rows = settings.layout.rows
    most = rows * augment.image_size**2 // PIXELS_PER_THREAD
    threads = max(1, min(settings.num_threads, most))
    parts = max(n for n in range(1, threads + 1) if rows % n == 0)
    return EagerViews(augment, threads=threads, parts=parts)


def failure_reason(error: Exception) -> str:
    """The line of a DALI error that says what happened; the rest stays in the exception's cause."""
    text = str(error).rpartition("encountered:")[2]
    return next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
