"""The images that batches are gathered from; what a step does not draw is never copied.

On the host the arrays stay as the data set holds them, memory-mapped ones on disk included. On a
GPU the images that the split uses are sent once, as one uint8 tensor, and gathered there; where
they do not fit, a batch is gathered on the host and sent.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.splits.split import Split
from simpro_fast.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.5
"""With `data.resident=auto`, the largest share of the free device memory that images may take."""
_CHUNK = 4096


class ImageStore:
    """Gathers the images of a step by position in the split's index lists.

    Args:
        resident: the key `data.resident`; on a CPU the images are always on the host.

    Raises:
        ConfigError: `data.resident=device` where the images do not fit.
    """

    def __init__(
        self,
        dataset: ArrayDataset,
        split: Split,
        *,
        device: torch.device,
        resident: str,
    ) -> None:
        self._labeled, self._unlabeled = dataset.images, dataset.unlabeled_pool
        self._labeled_rows, self._unlabeled_rows = split.labeled, split.unlabeled
        self._side, self._device = dataset.image_size, device
        self._on_device: Tensor | None = None
        if device.type == "cuda" and resident != "host":
            self._move_to_device(required=resident == "device")

    def gather(self, labeled: np.ndarray, unlabeled: np.ndarray) -> tuple[Tensor, np.ndarray]:
        """The images at some positions of both lists.

        Args:
            labeled, unlabeled: int64 [b] and [m] positions in the index lists of the split.

        Returns:
            images uint8 [n, H, W, 3] on the device, and the row in them of every position,
            int64 [b + m], labeled ones first. All images that lie on a GPU, or just those asked
            for.
        """
        rows = self._labeled_rows[labeled], self._unlabeled_rows[unlabeled]
        if self._on_device is not None:
            return self._on_device, np.concatenate(rows)
        images = np.concatenate([self._labeled[rows[0]], self._unlabeled[rows[1]]])
        gathered = torch.from_numpy(images)
        if self._device.type == "cuda":
            gathered = gathered.pin_memory().to(self._device, non_blocking=True)
        return gathered, np.arange(len(gathered))

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
