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
from simpro_fast.utils.errors import ConfigError

logger = logging.getLogger(__name__)

DEVICE_SHARE = 0.5
"""With `data.resident=auto`, the largest share of the free device memory that images may take."""
_CHUNK = 4096


class ImageStore:
    """Gathers the images of a step.

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
        self._dataset_rows = split.labeled, split.unlabeled
        self._own = len(split.own_labeled)
        self._side, self._device = dataset.image_size, device
        self._on_device: Tensor | None = None
        self._device_rows: tuple[np.ndarray, np.ndarray]
        if device.type == "cuda" and resident != "host":
            self._move_to_device(required=resident == "device")

    def gather(
        self, labeled_positions: np.ndarray, unlabeled_positions: np.ndarray
    ) -> tuple[Tensor, np.ndarray]:
        """The images of a step on the device.

        Args:
            labeled_positions: int64 [b] in `Split.labeled`.
            unlabeled_positions: int64 [m] in `Split.unlabeled`.

        Returns:
            images uint8 [n, H, W, 3] on the device: all that are resident on a GPU, else just those
            asked for.
            device_rows int64 [b + m]: the row of each position in them, labeled ones first.
        """
        if self._on_device is not None:
            labeled, unlabeled = self._device_rows
            device_rows = [labeled[labeled_positions], unlabeled[unlabeled_positions]]
            return self._on_device, np.concatenate(device_rows)
        labeled, unlabeled = self._dataset_rows
        # Unlabeled images that a method has labeled come from the other pool.
        joined = labeled_positions >= self._own
        own_rows = np.where(joined, labeled[0], labeled[labeled_positions])
        images = np.concatenate(
            [self._labeled[own_rows], self._unlabeled[unlabeled[unlabeled_positions]]]
        )
        if joined.any():
            images[: len(joined)][joined] = self._unlabeled[labeled[labeled_positions[joined]]]
        gathered = torch.from_numpy(images)
        if self._device.type == "cuda":
            gathered = gathered.pin_memory().to(self._device, non_blocking=True)
        return gathered, np.arange(len(gathered))

    def _move_to_device(self, *, required: bool) -> None:
        used, *device_rows = self._used()
        size = (len(used[0]) + len(used[1])) * self._side**2 * 3
        free, _ = torch.cuda.mem_get_info(self._device)
        if size > (free if required else DEVICE_SHARE * free):
            sizes = f"{size / 2**30:.1f} GiB of images, {free / 2**30:.1f} GiB free on the GPU"
            if required:
                raise ConfigError(f"data.resident=device: {sizes}; set data.resident=auto")
            logger.info("%s: they stay on the host, and each batch is copied", sizes)
            return
        resident = torch.empty(
            (len(used[0]) + len(used[1]), self._side, self._side, 3),
            dtype=torch.uint8,
            device=self._device,
        )
        start = 0
        for images, dataset_rows in zip((self._labeled, self._unlabeled), used, strict=True):
            for first in range(0, len(dataset_rows), _CHUNK):
                part = torch.from_numpy(np.asarray(images[dataset_rows[first : first + _CHUNK]]))
                resident[start : start + len(part)].copy_(part)
                start += len(part)
        self._on_device, self._device_rows = resident, (device_rows[0], device_rows[1])

    def _used(self) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray, np.ndarray]:
        """Dataset rows of both pools that the split uses, each once, then the device rows of the
        labeled and of the unlabeled positions."""
        labeled, unlabeled = self._dataset_rows
        if self._labeled is not self._unlabeled:
            own = self._own
            rows = np.arange(own + len(unlabeled))
            order = np.argsort(unlabeled)
            joined = order[np.searchsorted(unlabeled, labeled[own:], sorter=order)]
            return (labeled[:own], unlabeled), np.append(rows[:own], own + joined), rows[own:]
        used, rows = np.unique(np.concatenate([labeled, unlabeled]), return_inverse=True)
        return (used, unlabeled[:0]), rows[: len(labeled)], rows[len(labeled) :]
