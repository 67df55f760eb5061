"""All views of a step as one batch, on the images' device: weak crop and flip, strong policy.

The images of a step come once, [n, H, W, 3]; a table on the host says which views to make of them.
Padding is a matter of indices, so nobody keeps padded images.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from simpro_fast.data.augment.rand_augment import (
    apply_strong_policy,
    strong_table,
    to_device,
    weak_table,
)
from simpro_fast.data.batch import AugmentConfig
from simpro_fast.data.sampling.draws import AugmentParams


@dataclass(frozen=True)
class ViewPlan:
    """What to make of a batch of images; row r of every field belongs to view r."""

    image: np.ndarray
    """int64 [v]: which image of the batch."""
    flip: np.ndarray
    """bool [v]: mirror horizontally, before the crop."""
    shift: np.ndarray
    """int64 [v, 2]: offset (y, x) of the crop in the reflect-padded image."""
    strong: np.ndarray
    """int32 [v, 10], see `policy.strong_table`."""

    def __len__(self) -> int:
        return len(self.image)

    def __getitem__(self, part: slice) -> ViewPlan:
        return ViewPlan(self.image[part], self.flip[part], self.shift[part], self.strong[part])


def view_plan(draws: AugmentParams, images: int, augment: AugmentConfig) -> ViewPlan:
    """The table of `images` images from their draws, view-major; view 0 is the weak one."""
    side = augment.image_size
    strong = strong_table(draws, cutout=augment.cutout, width=side, height=side)
    strong[:images] = weak_table(images)
    image = np.tile(np.arange(images), len(draws) // images)
    return ViewPlan(image, draws.flip, draws.shift, strong)


def join_plans(tables: Sequence[ViewPlan], starts: Sequence[int]) -> ViewPlan:
    """The tables one after another; image 0 of each is image `start` of the common batch."""
    return ViewPlan(
        np.concatenate([t.image + start for t, start in zip(tables, starts, strict=True)]),
        np.concatenate([t.flip for t in tables]),
        np.concatenate([t.shift for t in tables]),
        np.concatenate([t.strong for t in tables]),
    )


def make_views(images: Tensor, table: ViewPlan, *, max_shift: int) -> Tensor:
    """uint8 [n, H, W, 3] to uint8 [v, H, W, 3], contiguous, on the same device."""
    views = crop_flip(images, table, max_shift=max_shift)
    apply_strong_policy(views, table.strong)
    return views


class ViewMaker:
    """`make_views` with the work shared among threads, on the CPU.

    Torch operations on so small pictures leave other cores idle; each thread makes every n-th view,
    so that weak and strong ones are shared alike.
    """

    def __init__(self, threads: int) -> None:
        self._threads = threads
        # More torch threads in each would only spin against those that train.
        self._pool = ThreadPoolExecutor(threads, "views", lambda: torch.set_num_threads(1))

    def __call__(self, images: Tensor, table: ViewPlan, *, max_shift: int) -> Tensor:
        """uint8 [n, H, W, 3] to uint8 [v, H, W, 3], contiguous."""
        views = images.new_empty(len(table), *images.shape[1:])

        def make(first: int) -> None:
            part = slice(first, None, self._threads)
            views[part] = make_views(images, table[part], max_shift=max_shift)

        list(self._pool.map(make, range(self._threads)))
        return views

    def close(self) -> None:
        self._pool.shutdown()


def crop_flip(images: Tensor, table: ViewPlan, *, max_shift: int) -> Tensor:
    """The weak views: flip, pad by reflection, crop at `shift` (0..2*max_shift); one gather."""
    count, height, width, channels = images.shape
    device = images.device
    dtype = torch.int32 if count * height * width < 2**31 else torch.int64
    image, y, x = to_device(
        [table.image, table.shift[:, 0], table.shift[:, 1] + (2 * max_shift + 1) * table.flip],
        device,
    )
    rows = _reflected(height, max_shift, device)[: 2 * max_shift + 1].index_select(0, y)
    columns = _reflected(width, max_shift, device).index_select(0, x).to(dtype)
    rows = ((image * height)[:, None] + rows).mul_(width).to(dtype)
    pixels = (rows[:, :, None] + columns[:, None, :]).view(-1)
    out = images.view(-1, channels).index_select(0, pixels)
    return out.view(len(table), height, width, channels)


@lru_cache(maxsize=8)
def _reflected(side: int, pad: int, device: torch.device) -> Tensor:
    """Pixel behind each place of a line cut from a reflect-padded one, int64 [2 * (2p + 1), side].

    Row s is the cut at offset s; row 2p + 1 + s the same of the mirrored line.
    """
    places = np.abs(np.arange(2 * pad + 1)[:, None] + np.arange(side) - pad)
    places = np.minimum(places, 2 * (side - 1) - places)
    return torch.from_numpy(np.concatenate([places, side - 1 - places])).to(device)
