"""The loader that trains from image files: our draws name the paths and the crops."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from simpro_fast.data.augment.crops import crop_words, placed, random_crops
from simpro_fast.data.augment.views import strong_table, weak_table
from simpro_fast.data.batch import AugmentConfig, Batch, LoaderSettings, StepCounter, sent
from simpro_fast.data.datasets.image_list import ImageListDataset
from simpro_fast.data.files.decode import (
    CHANGED,
    OK,
    REFUSED,
    UNREADABLE,
    check_file,
    read_header,
    size_status,
)
from simpro_fast.data.files.manifest import Row
from simpro_fast.data.pipeline.array_loader import failure_reason
from simpro_fast.data.pipeline.file_graph import (
    VIEW_INPUTS,
    GraphDecoder,
    build_file_pipeline,
    encoded_array,
    path_array,
)
from simpro_fast.data.pipeline.outputs import Outputs
from simpro_fast.data.sampling.draws import MASK32, StepDraws, StepSampler, Stream, below, raw_words
from simpro_fast.data.sampling.labeled_order import labeled_order
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import UserError
from simpro_fast.utils.local_files import PAUSES, repeated

logger = logging.getLogger(__name__)

ATTEMPTS = 100
_KINDS = ("labeled", "unlabeled")


@dataclass(frozen=True)
class _Prepared:
    """A step whose inputs the pipeline has taken, or is about to take."""

    step: int
    positions: np.ndarray
    """int64 [b + m] in the lists of the split, labeled ones first."""
    replaced: int
    """How many of them replace a damaged image."""
    inputs: tuple[Any, ...]
    """The images (paths, or futures of lists of their bytes), their listed heights and widths, then
    each view's `VIEW_INPUTS`."""


def _read(rows: list[Row]) -> list[np.ndarray]:
    return [encoded_array(row.image) for row in rows]


class FileLoader:
    """One rank's batches from files; implements `data.batch.Loader`.

    A damaged file stops the run, or with on_bad_image=skip another image of the same set (of the
    same class, if labeled) takes its place: a pure function of seed, step, place and attempt,
    so that ranks and resumed runs agree without talking. A file that is gone, or is another one
    than was listed, always stops it.

    If any image lies in a tar shard, all are read here, in threads and one step ahead of what the
    pipeline asks for; else the pipeline reads them.
    """

    def __init__(
        self,
        settings: LoaderSettings,
        dataset: ImageListDataset,
        split: Split,
        augment: AugmentConfig,
    ) -> None:
        data, seed = settings.data, settings.seed
        self._settings, self._dataset, self._split = settings, dataset, split
        self._data, self._layout, self._augment = data, settings.layout, augment
        self._seed, self._rank, self._device = seed, settings.rank, settings.device
        self._targets = split.targets(dataset)
        self._draws = StepSampler(
            settings,
            labeled_order(data, self._targets, dataset.num_classes, seed),
            num_unlabeled=len(split.unlabeled),
            augment=replace(augment, max_shift=0),  # crops of files are boxes
        )
        self._rows = rows = dataset.manifest.rows
        self._in_shards = any(row.member for row in rows)
        self._width = np.array([row.width for row in rows], np.int64)
        self._height = np.array([row.height for row in rows], np.int64)
        self._counter = StepCounter(settings.start_step)
        self._source_step = settings.start_step
        self._ahead: deque[_Prepared] = deque()
        self._waiting: deque[_Prepared] = deque()
        self._failure: str | None = None
        self._tries = 0
        self._bad: set[int] = set()  # dataset rows
        self.replaced = 0
        """Images of the batches returned so far that replace a damaged one."""
        # See ArrayLoader: this thread's pool of torch threads must exist before the pipeline's.
        torch.get_num_threads()
        self._readers: ThreadPoolExecutor | None = None
        self._outputs = Outputs(settings.device)
        self._pipe: Any = self._build()

    def next(self, step: int) -> Batch:
        if self._pipe is None:
            raise UserError(f"data of step {step}: {self._failure or 'the loader is closed'}")
        self._counter.take(step)
        while True:
            try:
                outputs = self._outputs.run(self._pipe)
                self._tries = 0
                break
            except Exception as error:
                self._recover(step, error)
        prepared = self._waiting.popleft()
        if prepared.step != step:
            raise RuntimeError(f"views of step {step} met the labels of step {prepared.step}")
        self.replaced += prepared.replaced
        b, layout = self._layout.labeled, self._layout
        parts = [view[:b] for view in outputs[: layout.labeled_views]]
        parts += [view[b:] for view in outputs]
        views = torch.cat(parts).permute(0, 3, 1, 2)
        labeled, unlabeled = np.split(prepared.positions, [b])
        truth = self._dataset.labels[self._split.unlabeled[unlabeled]]
        labels = self._targets[labeled], truth, labeled, unlabeled
        return Batch(step, views, *(sent(array, self._device) for array in labels))

    def describe(self, step: int) -> dict[str, Any]:
        draws = self._draws(step)
        indices = self._rows_of(self._positions(draws)[0])
        labeled, unlabeled = np.split(indices, [self._layout.labeled])
        return {
            "step": step,
            "labeled": labeled.tolist(),
            "unlabeled": unlabeled.tolist(),
            "paths": [str(self._rows[i].image) for i in indices],
            "labeled_views": draws.labeled_views.as_lists(),
            "unlabeled_views": draws.unlabeled_views.as_lists(),
            "labeled_boxes": self._boxes(step, 0, labeled).tolist(),
            "unlabeled_boxes": self._boxes(step, 1, unlabeled).tolist(),
        }

    def close(self) -> None:
        self._outputs.close()
        pipe, self._pipe = self._pipe, None
        del pipe  # the last reference: its threads end here
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)
            self._readers = None

    def __del__(self) -> None:
        if getattr(self, "_pipe", None) is not None:
            self.close()

    def _build(self) -> Any:
        layout = self._layout
        if self._in_shards:
            self._readers = ThreadPoolExecutor(self._settings.num_threads)
        return build_file_pipeline(
            self._source,
            read=not self._in_shards,
            images=layout.labeled + layout.unlabeled,
            num_views=1 + layout.strong_views,
            augment=self._augment,
            square=self._dataset.square,
            device=self._device,
            num_threads=self._settings.num_threads,
            prefetch=self._data.prefetch,
            hw_decoder_load=self._data.hw_decoder_load,
        )

    def _recover(self, step: int, error: Exception) -> None:
        """Find the files that failed the step; leave them out and start again there, or raise."""
        reason = self._failure or failure_reason(error)
        found = {} if self._failure else self._damaged(step)
        self.close()
        if not found and not self._failure and self._tries < len(PAUSES):
            # Every file can be read by now, so what failed was the moment: a network file system.
            logger.warning("step %d: %s; every file can be read, tried again", step, reason)
            repeated.add()
            time.sleep(PAUSES[self._tries])
            self._tries += 1
            self._start_again(step)
            return
        gone = [i for i, status in found.items() if status.startswith((UNREADABLE, CHANGED))]
        if found and not gone and self._data.on_bad_image == "skip":
            for index, status in found.items():
                logger.warning("step %d: skipped %s: %s", step, self._rows[index].image, status)
            self._bad |= found.keys()
            self._start_again(step)
            return
        if found:
            index = gone[0] if gone else next(iter(found))
            cure = "restore it" if gone else "repair it, set data.on_bad_image=skip"
            image = self._rows[index].image
            reason = f"{image}: {found[index]}; {cure}, or run simpro-fast prepare again"
        self._failure = reason
        raise UserError(f"data of step {step}: {reason}") from error

    def _start_again(self, step: int) -> None:
        """A new pipeline whose first step is this one."""
        self._ahead.clear()
        self._waiting.clear()
        self._source_step = step
        self._pipe = self._build()

    def _damaged(self, step: int) -> dict[int, str]:
        """Files of a step that cannot be used, one by one: data set row to reason."""
        found = {}
        indices = list(dict.fromkeys(self._rows_of(self._positions(self._draws(step))[0]).tolist()))
        for i in indices:
            row = self._rows[i]
            # The list is the limit of the size: another size is not decoded.
            facts = read_header(row.image, math.inf)
            status = size_status(facts, (row.width, row.height))
            if status == OK:
                status = check_file(row.image, megapixels=math.inf).status
            if status != OK:
                found[i] = status
        if not found:
            decoder = GraphDecoder(self._device)
            for i in indices:
                row = self._rows[i]
                if decoder(encoded_array(row.image), row.width, row.height) is None:
                    found[i] = REFUSED
        return found

    def _rows_of(self, positions: np.ndarray) -> np.ndarray:
        """Dataset rows int64 [b + m] of positions, labeled ones first."""
        labeled, unlabeled = np.split(positions, [self._layout.labeled])
        return np.concatenate([self._split.labeled[labeled], self._split.unlabeled[unlabeled]])

    def _positions(self, draws: StepDraws) -> tuple[np.ndarray, int]:
        """Positions int64 [b + m] of a step with damaged images replaced, and how many were."""
        positions = np.concatenate([draws.labeled_positions, draws.unlabeled_positions])
        if not self._bad:
            return positions, 0
        rows = self._rows_of(positions).tolist()
        bad = [j for j, i in enumerate(rows) if i in self._bad]
        b = self._layout.labeled
        for j in bad:
            kind = int(j >= b)
            place = self._rank * (self._layout.unlabeled if kind else b) + j - kind * b
            positions[j] = self._replacement(draws.step, kind, place, int(positions[j]))
        return positions, len(bad)

    def _replacement(self, step: int, kind: int, place: int, position: int) -> int:
        """Another position for a place in the global batch of a step."""
        rows = (self._split.labeled, self._split.unlabeled)[kind]
        members = np.arange(len(rows))
        if kind == 0:
            members = members[self._targets == self._targets[position]]
        for attempt in range(ATTEMPTS):
            word = raw_words(
                self._seed,
                Stream.REPLACEMENT,
                step,
                start_block=place,
                count=1,
                lane=2 * attempt + kind,
            )
            candidate = int(members[below(word & MASK32, len(members))[0]])
            if int(rows[candidate]) not in self._bad:
                return candidate
        raise UserError(
            f"{self._rows[rows[position]].image} is damaged, and so are {ATTEMPTS} {_KINDS[kind]} "
            "images drawn in its place; repair the data set"
        )

    def _source(self) -> tuple[Any, ...]:
        """Inputs of the next step; the pipeline asks `data.prefetch` steps ahead."""
        step = self._source_step
        try:
            # The next step's files are read while this one is decoded and trained on.
            while len(self._ahead) < 1 + self._in_shards:
                self._ahead.append(self._prepare(self._draws(step + len(self._ahead))))
        except Exception as error:
            self._failure = f"the draws of step {step} failed: {error}"
            raise
        prepared = self._ahead.popleft()
        self._source_step += 1
        self._waiting.append(replace(prepared, inputs=()))
        images, *parameters = prepared.inputs
        if self._readers:
            images = [image for part in images for image in part.result()]
        return images, *parameters

    def _boxes(self, step: int, kind: int, dataset_rows: np.ndarray) -> np.ndarray:
        """Crops float64 [views * n, 4] of one kind of images (int64 [n]), view-major."""
        layout, data = self._layout, self._data
        num_views = (layout.labeled_views, 1 + layout.strong_views)[kind]
        count = len(dataset_rows)
        draws = crop_words(
            self._seed,
            (Stream.AUGMENT_LABELED, Stream.AUGMENT_UNLABELED)[kind],
            step,
            start=self._rank * count,
            count=count,
            num_views=num_views,
        )
        boxes = []
        for view, part in enumerate(np.split(draws, num_views)):
            scale = data.strong_scale if view else data.weak_scale
            width, height = self._width[dataset_rows], self._height[dataset_rows]
            boxes.append(
                random_crops(
                    part,
                    width,
                    height,
                    scale=scale,
                    ratio=data.crop_ratio,
                    fit=self._dataset.fit,
                )
            )
        return np.concatenate(boxes)

    def _prepare(self, draws: StepDraws) -> _Prepared:
        layout, side = self._layout, self._augment.image_size
        positions, replaced = self._positions(draws)
        indices = self._rows_of(positions)
        parts = []
        for kind, (rows, views) in enumerate(
            zip(
                np.split(indices, [layout.labeled]),
                (draws.labeled_views, draws.unlabeled_views),
                strict=True,
            )
        ):
            boxes = self._boxes(draws.step, kind, rows)
            of_views = np.resize(rows, len(boxes))
            width, height = self._width[of_views], self._height[of_views]
            crops = np.concatenate(placed(boxes, width, height, side), axis=1)
            table = strong_table(views, cutout=self._augment.cutout, width=side, height=side)
            parts.append((len(rows), crops, views.flip, table))
        drawn = [self._rows[i] for i in indices]
        if self._readers:
            # One task a thread: with one a file, handing over would cost more than reading.
            size = -(-len(drawn) // self._settings.num_threads)
            chunks = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            inputs: list[Any] = [[self._readers.submit(_read, chunk) for chunk in chunks]]
        else:
            inputs = [[path_array(row.path) for row in drawn]]
        inputs += [self._height[indices, None], self._width[indices, None]]
        for view in range(1 + layout.strong_views):
            per_kind = [self._view_inputs(view, *part, side) for part in parts]
            joined = [np.concatenate(arrays) for arrays in zip(*per_kind, strict=True)]
            # The weak view has no table. DALI takes C order only, which joining lost.
            kept = len(VIEW_INPUTS) - (view == 0)
            inputs += [np.ascontiguousarray(array) for array in joined[:kept]]
        return _Prepared(draws.step, positions, replaced, tuple(inputs))

    @staticmethod
    def _view_inputs(
        view: int, count: int, crops: np.ndarray, flip: np.ndarray, table: np.ndarray, side: int
    ) -> tuple[np.ndarray, ...]:
        """`VIEW_INPUTS` of one view of the images of one kind; `crops` as `placed` gives them.

        All images of a pipeline have the same number of views; where a kind has fewer (labeled
        ones have no second strong view), the surplus ones cost next to nothing and are dropped.
        """
        rows = slice(view * count, (view + 1) * count)
        if rows.stop > len(crops):
            crops = np.tile([0.0, 0, 1, 1, 0, 0, side, side], (count, 1))
            flip, table, rows = np.zeros(count), weak_table(count), slice(count)
        box, place = crops[rows, :4].astype(np.float32), crops[rows, 4:].astype(np.int32)
        return (
            box[:, [1, 0]],
            box[:, [3, 2]],
            (place[:, 2:] - place[:, :2])[:, ::-1].astype(np.float32),
            -place[:, [1, 0]],
            flip[rows].astype(np.int32),
            table[rows],
        )
