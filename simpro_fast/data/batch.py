"""Batches as the trainer sees them, and the settings that decide what they look like.

Row order of `Batch.views`, with b labeled and m unlabeled images on this rank, L labeled and
V strong views:

    rows 0 .. L*b - 1            labeled, view-major: all weak views, then all strong ones
    next m rows                  unlabeled, weak
    next V*m rows                unlabeled, strong, view-major

Ranks take contiguous slices of the global batch: labeled position j belongs to rank j // b.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor

from simpro_fast.config.data import DataConfig
from simpro_fast.utils.errors import ConfigError

Kind = Literal["labeled", "unlabeled"]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class AugmentConfig:
    """The augmentation settings with every `auto` and None of the configuration resolved."""

    image_size: int
    """Side, pixels."""
    max_shift: int
    """Largest shift of the weak view's crop, pixels."""
    flip: bool
    """Whether half of the views are mirrored."""
    cutout: int = 0
    """Cutout side, pixels; 0 for none."""
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Per channel, on the 0..1 scale."""
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)


@dataclass(frozen=True)
class Batch:
    """One step's input on this rank; all tensors are on the training device."""

    step: int
    views: Tensor
    """[L*b + (1+V)*m, 3, H, W], normalised, channels_last; float32, or bfloat16 for autocast where
    the loader can make them so."""
    targets: Tensor
    """int64 [b], labels of the labeled images."""
    truth: Tensor
    """int64 [m], true labels of the unlabeled images, -1 where unknown. For diagnostics only."""
    labeled_positions: Tensor | None = None
    """int64 [b] in `Split.labeled`."""
    unlabeled_positions: Tensor | None = None
    """int64 [m] in `Split.unlabeled`."""
    uniform_labeled: Tensor | None = None
    """float32 [b, n] in [0, 1), n as the method asks; None: none."""
    uniform_unlabeled: Tensor | None = None
    """float32 [m, n]."""

    def by_image(self) -> dict[str, tuple[Kind, Tensor]]:
        """Return what there is of each image that enters a step, besides its views."""
        kinds: dict[str, Kind] = {
            "targets": "labeled",
            "labeled_positions": "labeled",
            "uniform_labeled": "labeled",
            "unlabeled_positions": "unlabeled",
            "uniform_unlabeled": "unlabeled",
        }
        found = {name: (kind, getattr(self, name)) for name, kind in kinds.items()}
        return {name: pair for name, pair in found.items() if pair[1] is not None}

    def micro_batches(self, layout: BatchLayout, parts: int) -> Iterator[Batch]:
        """Parts of consecutive images, each in the row order of `views`; one part is the batch.

        Args:
            layout: sizes of this batch; `parts` divides the labeled images, hence the unlabeled.
        """
        if parts == 1:
            yield self
            return
        small = layout.part(parts)
        for part in range(parts):
            blocks, first = [], 0
            for count, size, views in (
                (layout.labeled, small.labeled, layout.labeled_views),
                (layout.unlabeled, small.unlabeled, 1 + layout.strong_views),
            ):
                for _ in range(views):  # view-major: each view has a block of all images
                    start = first + part * size
                    blocks.append(self.views[start : start + size])
                    first += count
            sizes = {"labeled": small.labeled, "unlabeled": small.unlabeled}
            images = {kind: slice(part * size, (part + 1) * size) for kind, size in sizes.items()}
            of_images = {name: t[images[kind]] for name, (kind, t) in self.by_image().items()}
            truth = self.truth[images["unlabeled"]]
            yield Batch(step=self.step, views=torch.cat(blocks), truth=truth, **of_images)


class Loader(Protocol):
    """An endless source of batches, each a pure function of the configuration and the step."""

    def next(self, step: int) -> Batch:
        """The batch of `step`. Steps are asked for in order, from `start_step` on; anything else,
        and any failure, is an error that names the step. On a GPU, work on a batch is queued before
        the next batch is asked for: its memory may be used anew after that work."""

    def describe(self, step: int) -> dict[str, Any]:
        """The draws of any step as plain lists, so that its batch can be replayed."""

    def close(self) -> None:
        """Free the pipeline and its threads. Harmless when repeated."""


@dataclass(frozen=True)
class BatchLayout:
    """Sizes of one rank's share of a step."""

    labeled: int
    """b, labeled images."""
    unlabeled: int
    """m, unlabeled images."""
    labeled_views: int
    """L: 1 weak only, 2 weak and strong."""
    strong_views: int
    """V, strong views of each unlabeled image."""

    @property
    def rows(self) -> int:
        """Views in a batch: L*b + (1+V)*m."""
        return sum(self.rows_by_kind)

    @property
    def rows_by_kind(self) -> list[int]:
        """Labeled, weak and strong views: [L*b, m, V*m]."""
        return [
            self.labeled_views * self.labeled,
            self.unlabeled,
            self.strong_views * self.unlabeled,
        ]

    def part(self, parts: int) -> BatchLayout:
        """Sizes of each of so many equal parts of the images."""
        return replace(self, labeled=self.labeled // parts, unlabeled=self.unlabeled // parts)


def rank_layout(
    data: DataConfig, *, labeled_views: int, strong_views: int, world_size: int
) -> BatchLayout:
    """This rank's sizes; a global batch that the ranks cannot share equally is a `ConfigError`."""
    if data.batch_size % world_size:
        raise ConfigError(
            f"data.batch_size={data.batch_size} cannot be shared equally by {world_size} ranks; "
            f"choose a multiple of {world_size}"
        )
    labeled = data.batch_size // world_size
    return BatchLayout(labeled, data.mu * labeled, labeled_views, strong_views)


@dataclass(frozen=True, kw_only=True)
class LoaderSettings:
    """What a loader of one rank is built from, besides data set and split."""

    data: DataConfig
    labeled_views: int = 2
    """L: 1 weak only, 2 weak and strong."""
    strong_views: int = 2
    """V, of each unlabeled image."""
    seed: int = 1
    rank: int = 0
    world_size: int = 1
    device: torch.device = CPU
    start_step: int = 0
    """The first step that will be asked for."""
    num_threads: int = 1
    """Of the pipeline, and of what reads and augments for it."""
    dtype: torch.dtype = torch.float32
    """Of the views where one launch makes them (small pictures on a GPU); others are float32."""

    @cached_property
    def layout(self) -> BatchLayout:
        """Sizes of this rank's share. Raises as `rank_layout` does."""
        return rank_layout(
            self.data,
            labeled_views=self.labeled_views,
            strong_views=self.strong_views,
            world_size=self.world_size,
        )


def sent(values: np.ndarray, device: torch.device) -> Tensor:
    """The array as a tensor on the device, for which the host does not wait."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()  # from other memory a copy waits for all work before it
    return tensor.to(device, non_blocking=True)


class StepCounter:
    """The steps that a loader has returned; refuses a step that is not the next one."""

    def __init__(self, start_step: int) -> None:
        self.expected = start_step

    def take(self, step: int) -> None:
        if step != self.expected:
            raise ValueError(
                f"batch of step {step} asked for, but step {self.expected} is next; "
                "build a new loader with start_step to go elsewhere"
            )
        self.expected += 1
