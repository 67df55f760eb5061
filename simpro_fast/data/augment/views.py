"""The plan of a step's views on the host, and the two makers of views that follow it.

Small pictures on a GPU come from one launch that also normalises them; all others are made by the
eager reference of that kernel as uint8, and the pipeline normalises them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from simpro_kernels.augment.op import augment_views
from simpro_kernels.augment.operations import (
    FLIP,
    IMAGE,
    OPERATIONS_PER_VIEW,
    PLAN_COLUMNS,
    POLICY,
    POLICY_COLUMNS,
    SHIFT,
)
from simpro_kernels.augment.reference import make_views
from torch import Tensor

from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.sampling.draws import AugmentParams


def view_plan(params: AugmentParams, images: np.ndarray, augment: AugmentConfig) -> np.ndarray:
    """The plan of v views, int32 [v, 14] (columns: `simpro_kernels.augment.operations`).

    View-major; view 0 is the weak one.

    Args:
        images: int [n], the row of each image among those at hand; v is a multiple of n.
    """
    side, count = augment.image_size, len(images)
    plan = np.empty((len(params), PLAN_COLUMNS), np.int32)
    plan[:, IMAGE] = np.tile(images, len(params) // count)
    plan[:, FLIP] = params.flip
    plan[:, SHIFT] = params.shift
    plan[:, POLICY] = strong_table(params, cutout=augment.cutout, width=side, height=side)
    plan[:count, POLICY] = weak_table(count)
    return plan


def strong_table(params: AugmentParams, *, cutout: int, width: int, height: int) -> np.ndarray:
    """The policy's columns of a view plan, int32 [n, 10].

    Operation, level, negative of the first and of the second operation (IDENTITY where the coin
    said no), then the cutout box x0, y0, x1, y1, both ends included.
    """
    table = np.empty((len(params), POLICY_COLUMNS), np.int32)
    # By columns: numpy is slow on rows of a few numbers.
    for i in range(OPERATIONS_PER_VIEW):
        table[:, 3 * i] = params.operation[:, i] * params.apply[:, i]  # IDENTITY is 0
        table[:, 3 * i + 1] = params.level[:, i]
        table[:, 3 * i + 2] = params.negative[:, i]
    table[:, 6:] = cutout_boxes(params.cutout_centre, cutout, width, height)
    return table


def weak_table(n: int) -> np.ndarray:
    """The same of views that the policy leaves alone."""
    table = np.zeros((n, POLICY_COLUMNS), np.int32)
    table[:, -2:] = -1
    return table


def cutout_boxes(centre: np.ndarray, side: int, width: int, height: int) -> np.ndarray:
    """Inclusive boxes int32 [n, 4] = (x0, y0, x1, y1) of the published code's cutout.

    The far edge is counted from the already clipped near one and is part of the box, so a box
    is up to side + 1 pixels wide, and side / 2 + 1 at least. Side 0 gives empty boxes.

    Args:
        centre: float64 [n, 2], (y, x) in pixels.
    """
    if side == 0:
        return np.tile(np.array([0, 0, -1, -1], np.int32), (len(centre), 1))
    boxes = np.empty((len(centre), 4), np.int32)
    for axis, end in enumerate((width, height)):
        boxes[:, axis] = np.maximum(centre[:, 1 - axis] - side / 2, 0.0)
        boxes[:, 2 + axis] = np.minimum(boxes[:, axis] + side, end - 1)
    return boxes


class FusedViews:
    """Normalised views from one launch; see `augment_views`.

    DALI knows no bfloat16 and hands the bits on as int16.
    """

    normalised = True
    parts = 1

    def __init__(self, augment: AugmentConfig, dtype: torch.dtype) -> None:
        self._augment, self._dtype = augment, dtype

    def __call__(self, images: Tensor, plan: np.ndarray) -> list[Tensor]:
        """uint8 [n, H, W, 3] and int32 [v, 14] to the one part [v, H, W, 3]."""
        augment = self._augment
        views = augment_views(
            images,
            torch.from_numpy(plan),
            max_shift=augment.max_shift,
            mean=augment.mean,
            std=augment.std,
            dtype=self._dtype,
        )
        return [views.view(torch.int16) if self._dtype == torch.bfloat16 else views]

    def received(self, views: Tensor) -> Tensor:
        """Return the output of the pipeline, in its own dtype."""
        return views.view(self._dtype)

    def close(self) -> None:
        pass


class EagerViews:
    """uint8 views from the eager reference, on the CPU with the work shared among threads.

    Torch operations on so small pictures leave other cores idle; each thread makes every n-th view,
    so that weak and strong ones are shared alike.

    Args:
        parts: equal parts that the views come in; each is a sample of the pipeline, whose own
            threads share the samples.
    """

    normalised = False

    def __init__(self, augment: AugmentConfig, *, threads: int, parts: int) -> None:
        self._max_shift, self._threads, self.parts = augment.max_shift, threads, parts
        self._pool: ThreadPoolExecutor | None = None
        if threads > 1:
            # More torch threads in each would only spin against those that train.
            self._pool = ThreadPoolExecutor(threads, "views", lambda: torch.set_num_threads(1))

    def __call__(self, images: Tensor, plan: np.ndarray) -> list[Tensor]:
        """uint8 [n, H, W, 3] and int32 [v, 14] to parts of [v, H, W, 3], contiguous."""
        if self._pool is None:
            views = make_views(images, plan, max_shift=self._max_shift)
        else:
            views = images.new_empty(len(plan), *images.shape[1:])

            def make(first: int) -> None:
                part = slice(first, None, self._threads)
                views[part] = make_views(images, plan[part], max_shift=self._max_shift)

            list(self._pool.map(make, range(self._threads)))
        return list(views.chunk(self.parts))

    def received(self, views: Tensor) -> Tensor:
        return views

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
