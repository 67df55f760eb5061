"""Batches as the trainer sees them, and the one function that builds a loader.

Row order of `Batch.views`, with b labeled and m unlabeled images on this rank, L labeled and
V strong views:

    rows 0 .. L*b - 1            labeled, view-major: all weak views, then all strong ones
    next m rows                  unlabeled, weak
    next V*m rows                unlabeled, strong, view-major

Ranks take contiguous slices of the global batch: labeled position j belongs to rank j // b.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from simpro_fast.config.data import DataConfig
from simpro_fast.errors import ConfigError

if TYPE_CHECKING:
    from simpro_fast.data.datasets.registry import ArrayDataset
    from simpro_fast.data.splits.build import Split


@dataclass(frozen=True)
class Batch:
    """One step's input on this rank; all tensors are on the training device."""

    step: int
    views: Tensor
    """float32 [L*b + (1+V)*m, 3, H, W], normalised, channels_last."""
    targets: Tensor
    """int64 [b], labels of the labeled images."""
    truth: Tensor
    """int64 [m], true labels of the unlabeled images, -1 where unknown. For diagnostics only."""


class Loader(Protocol):
    """An endless source of batches, each a pure function of the configuration and the step."""

    def next(self, step: int) -> Batch:
        """The batch of `step`. Steps are asked for in order, from `start_step` on; anything else,
        and any failure, is an error that names the step."""

    def describe(self, step: int) -> dict[str, Any]:
        """The draws of any step as plain lists, so that its batch can be replayed."""

    def close(self) -> None:
        """Free the pipeline and its threads. Harmless when repeated."""


@dataclass(frozen=True)
class Shapes:
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

    def part(self, parts: int) -> Shapes:
        """Sizes of each of so many equal parts of the images."""
        return replace(self, labeled=self.labeled // parts, unlabeled=self.unlabeled // parts)


def rank_shapes(
    data: DataConfig, *, labeled_views: int, strong_views: int, world_size: int
) -> Shapes:
    """This rank's sizes; a global batch that the ranks cannot share equally is a `ConfigError`."""
    if data.batch_size % world_size:
        raise ConfigError(
            f"data.batch_size={data.batch_size} cannot be shared equally by {world_size} ranks; "
            f"choose a multiple of {world_size}"
        )
    labeled = data.batch_size // world_size
    return Shapes(labeled, data.mu * labeled, labeled_views, strong_views)


class StepCounter:
    """The steps that a loader has handed out; refuses a step that is not the next one."""

    def __init__(self, start_step: int) -> None:
        self.expected = start_step

    def take(self, step: int) -> None:
        if step != self.expected:
            raise ValueError(
                f"batch of step {step} asked for, but step {self.expected} is next; "
                "build a new loader with start_step to go elsewhere"
            )
        self.expected += 1


class SyntheticLoader:
    """The same random batch at every step: a stand-in for benches and machines without DALI.

    Views are standard normal, labels uniform; both are functions of `seed` alone.
    """

    def __init__(
        self,
        shapes: Shapes,
        *,
        image_size: int,
        num_classes: int,
        device: torch.device,
        seed: int = 0,
        start_step: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        views = torch.randn(shapes.rows, 3, image_size, image_size, generator=generator)
        self._views = views.to(device).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(
            num_classes, (shapes.labeled + shapes.unlabeled,), generator=generator
        ).to(device)
        self._targets, self._truth = labels.split([shapes.labeled, shapes.unlabeled])
        self._counter = StepCounter(start_step)

    def next(self, step: int) -> Batch:
        self._counter.take(step)
        return Batch(step, self._views, self._targets, self._truth)

    def describe(self, step: int) -> dict[str, Any]:
        return {"step": step, "synthetic": True}

    def close(self) -> None:
        pass


@dataclass(frozen=True)
class Views:
    """The augmentation settings with every `auto` and None resolved."""

    image_size: int
    shift: int
    """Largest shift of the weak view's crop, pixels."""
    flip: bool
    cutout: int
    """Cutout side, pixels; 0 for none."""
    mean: tuple[float, float, float]
    """Per channel, on the 0..1 scale."""
    std: tuple[float, float, float]


def resolve_views(data: DataConfig, dataset: ArrayDataset) -> Views:
    """Resolve `data.cutout`, `data.flip` and `data.shift` for this data set.

    `auto` cutout is half the side (16 px at 32 px), the default shift an eighth of it, and flips
    are a property of the data set (a mirrored digit is no digit).
    """
    side = dataset.images.shape[1]
    shift = side // 8 if data.shift is None else data.shift
    if shift >= side:
        raise ConfigError(
            f"data.shift={shift} is too large for {side} px images: reflection padding needs "
            f"at most {side - 1}"
        )
    return Views(
        image_size=side,
        shift=shift,
        flip=dataset.flip if data.flip is None else data.flip,
        cutout=side // 2 if isinstance(data.cutout, str) else data.cutout,
        mean=dataset.mean,
        std=dataset.std,
    )


def build_loader(
    data: DataConfig,
    dataset: ArrayDataset,
    split: Split,
    *,
    labeled_views: int,
    strong_views: int,
    seed: int,
    rank: int,
    world_size: int,
    device: torch.device,
    start_step: int,
    num_threads: int,
) -> Loader:
    """The DALI loader of one rank, from arrays or from image files.

    Raises `ConfigError` when the batch cannot be shared equally, when there are more ranks than
    labeled or unlabeled images, or for several steps per fetch from files; `UserError` when DALI
    is not installed.
    """
    from simpro_fast.data.datasets.image_list import OwnImages
    from simpro_fast.data.pipeline.array_loader import DaliLoader
    from simpro_fast.data.pipeline.file_loader import ImageLoader

    shapes = rank_shapes(
        data, labeled_views=labeled_views, strong_views=strong_views, world_size=world_size
    )
    for kind, count in (("labeled", len(split.labeled)), ("unlabeled", len(split.unlabeled))):
        if count < world_size:
            raise ConfigError(
                f"{count} {kind} images cannot be shared by {world_size} ranks; "
                f"use at most {count} ranks or more images"
            )
    arguments: dict[str, Any] = {
        "shapes": shapes,
        "views": resolve_views(data, dataset),
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
        "device": device,
        "start_step": start_step,
        "num_threads": num_threads,
    }
    if isinstance(dataset, OwnImages) and dataset.in_files:
        if data.steps_per_fetch > 1:
            raise ConfigError(
                f"data.steps_per_fetch={data.steps_per_fetch} is for arrays: decoding the files "
                "takes the time, and it is by the file; set it to 1, or pack the images"
            )
        return ImageLoader(data, dataset, split, **arguments)
    return DaliLoader(data, dataset, split, **arguments)
