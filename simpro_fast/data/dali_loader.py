"""The loader that feeds training: draws on the host, a DALI pipeline that turns them into views."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from simpro_fast.config.schema import DataConfig
from simpro_fast.data.draws import StepDraws, StepSource, ViewSettings
from simpro_fast.data.graph import build_pipeline, crop_inputs
from simpro_fast.data.loader import Batch, Shapes, StepCounter, Views
from simpro_fast.data.policy import Operation, strong_table, weak_table
from simpro_fast.data.resident import ResidentImages
from simpro_fast.data.sources import ArrayDataset
from simpro_fast.data.splits import Split
from simpro_fast.errors import UserError


@dataclass(frozen=True)
class _Prepared:
    """A step whose inputs the pipeline has taken, or is about to take."""

    draws: StepDraws
    parameters: tuple[np.ndarray, ...]
    targets: np.ndarray
    truth: np.ndarray


class DaliLoader:
    """One rank's batches through DALI; implements `loader.Loader`.

    The pipeline works `data.prefetch` steps ahead, so its sources count their own steps, starting
    at `start_step`; labels wait in a queue until the views of their step come out.
    """

    def __init__(
        self,
        data: DataConfig,
        dataset: ArrayDataset,
        split: Split,
        *,
        shapes: Shapes,
        views: Views,
        seed: int,
        rank: int,
        world_size: int,
        device: torch.device,
        start_step: int,
        num_threads: int,
    ) -> None:
        self._dataset, self._split = dataset, split
        self._shapes, self._views = shapes, views
        self._device = device
        self._draws = StepSource(
            seed=seed,
            labeled_labels=dataset.labels[split.labeled],
            num_classes=len(dataset.class_names),
            num_unlabeled=len(split.unlabeled),
            labeled=shapes.labeled,
            unlabeled=shapes.unlabeled,
            labeled_views=shapes.labeled_views,
            strong_views=shapes.strong_views,
            rank=rank,
            world_size=world_size,
            settings=ViewSettings(views.image_size, views.shift, views.flip, len(Operation)),
            class_balanced_power=(
                data.sampling_power if data.sampling == "class_balanced" else None
            ),
        )
        self._counter = StepCounter(start_step)
        self._source_step = start_step
        self._for_images: deque[_Prepared] = deque()
        self._for_parameters: deque[_Prepared] = deque()
        self._for_output: deque[_Prepared] = deque()
        self._failure: str | None = None
        # torch fixes the pool size of a thread at its first use. Do it for this one before the
        # threads of the pipeline choose theirs, which would otherwise become its default.
        torch.get_num_threads()
        self._resident: ResidentImages | None = ResidentImages(
            dataset, split, shapes, pad=views.shift, device=device, resident=data.resident
        )
        self._pipe: Any = build_pipeline(
            self._image_source,
            self._parameter_source,
            rows=shapes.rows,
            views=views,
            device=device,
            num_threads=num_threads,
            prefetch=data.prefetch,
        )

    def next(self, step: int) -> Batch:
        if self._pipe is None:
            raise UserError(f"data of step {step}: {self._failure or 'the loader is closed'}")
        self._counter.take(step)
        try:
            if self._device.type == "cuda":
                (output,) = self._pipe.run(torch.cuda.current_stream(self._device))
            else:
                (output,) = self._pipe.run()
            views = torch.from_dlpack(output.as_tensor()).permute(0, 3, 1, 2)
        except Exception as error:
            reason = self._failure or failure_reason(error)
            self.close()
            self._failure = reason
            raise UserError(f"data of step {step}: {reason}") from error
        prepared = self._for_output.popleft()
        if prepared.draws.step != step:
            raise RuntimeError(f"views of step {step} met the labels of step {prepared.draws.step}")
        return Batch(
            step=step,
            views=views,
            targets=torch.from_numpy(prepared.targets).to(self._device, non_blocking=True),
            truth=torch.from_numpy(prepared.truth).to(self._device, non_blocking=True),
        )

    def describe(self, step: int) -> dict[str, Any]:
        draws = self._draws(step)
        return {
            "step": step,
            "labeled": self._split.labeled[draws.labeled].tolist(),
            "unlabeled": self._split.unlabeled[draws.unlabeled].tolist(),
            "labeled_views": draws.labeled_views.as_lists(),
            "unlabeled_views": draws.unlabeled_views.as_lists(),
        }

    def close(self) -> None:
        pipe, self._pipe = self._pipe, None
        del pipe  # the last reference: its threads end here
        self._resident = None

    def __del__(self) -> None:
        if getattr(self, "_pipe", None) is not None:
            self.close()

    def _image_source(self) -> np.ndarray | torch.Tensor:
        """Padded images uint8 [views, H+2p, W+2p, 3] of the next step, where the pipeline runs."""
        draws = self._prepared(self._for_images).draws
        assert self._resident is not None  # it outlives the pipeline
        return self._resident.views(draws.labeled, draws.unlabeled)

    def _parameter_source(self) -> tuple[np.ndarray, ...]:
        return self._prepared(self._for_parameters).parameters

    def _prepared(self, queue: deque[_Prepared]) -> _Prepared:
        """The next step of one of the two sources; whichever comes first draws it for both."""
        if not queue:
            step = self._source_step
            try:
                prepared = self._prepare(self._draws(step))
            except Exception as error:
                self._failure = f"the draws of step {step} failed: {error}"
                raise
            self._source_step += 1
            for waiting in (self._for_images, self._for_parameters, self._for_output):
                waiting.append(prepared)
        return queue.popleft()

    def _prepare(self, draws: StepDraws) -> _Prepared:
        """Inputs of the pipeline, rows in the order of `Batch.views`."""
        shapes, views = self._shapes, self._views
        tables, shifts, flips = [], [], []
        for part, weak in (
            (draws.labeled_views, shapes.labeled),
            (draws.unlabeled_views, shapes.unlabeled),
        ):
            table = strong_table(
                part, cutout=views.cutout, width=views.image_size, height=views.image_size
            )
            table[:weak] = weak_table(weak)
            tables.append(table)
            shifts.append(part.shift)
            flips.append(part.flip)
        crop = crop_inputs(np.concatenate(shifts), np.concatenate(flips), views.shift)
        return _Prepared(
            draws=draws,
            parameters=(*crop, np.concatenate(tables)),
            targets=self._dataset.labels[self._split.labeled[draws.labeled]],
            truth=self._dataset.unlabeled_truth(self._split.unlabeled[draws.unlabeled]),
        )


def failure_reason(error: Exception) -> str:
    """The line of a DALI error that says what happened; the rest stays in the exception's cause."""
    text = str(error).rpartition("encountered:")[2]
    return next((line.strip() for line in text.splitlines() if line.strip()), repr(error))
