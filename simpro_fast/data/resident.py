"""The images that batches are gathered from; what a step does not draw is never copied.

On the host the arrays stay as the data set holds them, memory-mapped ones on disk included. On a
GPU the images that the split uses are sent once, as one uint8 tensor, and gathered there; where
they do not fit, a batch is gathered on the host and sent. Reflection padding, which turns the
shift of a weak view into a plain crop, is that of the gathered batch.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from simpro_fast.data.loader import Shapes
from simpro_fast.data.sources import ArrayDataset
from simpro_fast.data.splits import Split
from simpro_fast.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.5
"""With `data.resident=auto`, the largest share of the free device memory that images may take."""
_CHUNK = 4096


class ResidentImages:
    """Gathers the padded images of a step's views by position in the split's index lists.

    Args:
        shapes: images per step and views per image, see `loader` for the order of the rows.
        pad: reflected pixels on every side, less than the side of an image.
        resident: the key `data.resident`; on a CPU the images are always on the host.

    Raises:
        ConfigError: `data.resident=device` where the images do not fit.
    """

    def __init__(
        self,
        dataset: ArrayDataset,
        split: Split,
        shapes: Shapes,
        *,
        pad: int,
        device: torch.device,
        resident: str,
    ) -> None:
        self._labeled, self._unlabeled = dataset.images, dataset.unlabeled_pool
        self._labeled_rows, self._unlabeled_rows = split.labeled, split.unlabeled
        self._side, self._pad, self._device = dataset.image_size, pad, device
        self._view_rows = _view_rows(shapes)
        self._on_device: Tensor | None = None
        if device.type == "cuda":
            self._view_rows_on_device = torch.from_numpy(self._view_rows).to(device)
            self._reflected = torch.from_numpy(reflected(self._side, pad)).to(device)
            if resident != "host":
                self._move_to_device(required=resident == "device")

    def views(self, labeled: np.ndarray, unlabeled: np.ndarray) -> np.ndarray | Tensor:
        """The images at some positions of both lists, as often as a step has views of them.

        Args:
            labeled, unlabeled: int64 [b] and [m] positions in the index lists of the split.

        Returns:
            uint8 [views, H + 2 pad, W + 2 pad, 3]: an array, or a tensor on the GPU.
        """
        rows = self._labeled_rows[labeled], self._unlabeled_rows[unlabeled]
        if self._on_device is not None:
            chosen = torch.from_numpy(np.concatenate(rows)).to(self._device, non_blocking=True)
            return self._views_on_device(self._on_device.index_select(0, chosen))
        side, pad, b = self._side, self._pad, len(labeled)
        if self._device.type == "cuda":
            images = np.concatenate([self._labeled[rows[0]], self._unlabeled[rows[1]]])
            sent = torch.from_numpy(images).pin_memory().to(self._device, non_blocking=True)
            return self._views_on_device(sent)
        padded = np.empty((b + len(unlabeled), side + 2 * pad, side + 2 * pad, 3), np.uint8)
        inner = padded[:, pad : pad + side, pad : pad + side]
        inner[:b] = self._labeled[rows[0]]
        inner[b:] = self._unlabeled[rows[1]]
        _reflect_edges(padded, pad)
        return padded[self._view_rows]

    def _views_on_device(self, images: Tensor) -> Tensor:
        padded = images.index_select(1, self._reflected).index_select(2, self._reflected)
        return padded.index_select(0, self._view_rows_on_device)

    def _move_to_device(self, *, required: bool) -> None:
        used, labeled, unlabeled = self._used()
        size = (len(used[0]) + len(used[1])) * self._side**2 * 3
        free, _ = torch.cuda.mem_get_info(self._device)
        if size > (free if required else DEVICE_SHARE * free):
            sizes = f"{size / 2**30:.1f} GiB of images, {free / 2**30:.1f} GiB free on the GPU"
            if required:
                raise ConfigError(f"data.resident=device: {sizes}; set data.resident=auto")
            logger.info("%s: they stay on the host and are sent batch by batch", sizes)
            return
        resident = torch.empty(
            (len(used[0]) + len(used[1]), self._side, self._side, 3),
            dtype=torch.uint8,
            device=self._device,
        )
        start = 0
        for images, rows in zip((self._labeled, self._unlabeled), used, strict=True):
            for first in range(0, len(rows), _CHUNK):
                part = torch.from_numpy(np.asarray(images[rows[first : first + _CHUNK]]))
                resident[start : start + len(part)].copy_(part)
                start += len(part)
        self._on_device, self._labeled_rows, self._unlabeled_rows = resident, labeled, unlabeled

    def _used(self) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
        """Rows of both pools that the split uses, each once, and where they will be found."""
        labeled, unlabeled = self._labeled_rows, self._unlabeled_rows
        if self._labeled is not self._unlabeled:
            places = np.arange(len(labeled) + len(unlabeled))
            return (labeled, unlabeled), places[: len(labeled)], places[len(labeled) :]
        used, places = np.unique(np.concatenate([labeled, unlabeled]), return_inverse=True)
        return (used, unlabeled[:0]), places[: len(labeled)], places[len(labeled) :]


def _view_rows(shapes: Shapes) -> np.ndarray:
    """int64 [views]: which of the b + m drawn images each view of a step is made of."""
    labeled = np.arange(shapes.labeled)
    unlabeled = shapes.labeled + np.arange(shapes.unlabeled)
    return np.concatenate(
        [np.tile(labeled, shapes.labeled_views), np.tile(unlabeled, 1 + shapes.strong_views)]
    )


def reflected(side: int, pad: int) -> np.ndarray:
    """Source int64 [side + 2 pad] of every pixel along a padded axis; the edge is not repeated."""
    index = np.abs(np.arange(-pad, side + pad))
    return np.where(index < side, index, 2 * (side - 1) - index)


def reflect_pad(images: np.ndarray, pad: int) -> np.ndarray:
    """uint8 [n, H, W, C] -> [n, H + 2 pad, W + 2 pad, C], mirrored without repeating the edge."""
    n, height, width, channels = images.shape
    out = np.empty((n, height + 2 * pad, width + 2 * pad, channels), images.dtype)
    out[:, pad : pad + height, pad : pad + width] = images
    _reflect_edges(out, pad)
    return out


def _reflect_edges(padded: np.ndarray, pad: int) -> None:
    """Fill the border of [n, H + 2 pad, W + 2 pad, C] from its middle: columns, then whole rows."""
    rows = padded[:, pad : padded.shape[1] - pad]
    for lines in (rows.swapaxes(0, 2), padded.swapaxes(0, 1)):
        end = len(lines) - pad
        lines[:pad] = lines[pad + 1 : 2 * pad + 1][::-1]
        lines[end:] = lines[end - 1 - pad : end - 1][::-1]
