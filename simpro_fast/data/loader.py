"""The one function that builds a loader, and how it reads the configuration."""

from __future__ import annotations

from typing import Any

import torch

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import AugmentConfig, Loader, rank_layout
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import ImageListDataset
from simpro_fast.data.pipeline.array_loader import ArrayLoader
from simpro_fast.data.pipeline.file_loader import FileLoader
from simpro_fast.data.splits.split import Split
from simpro_fast.utils.errors import ConfigError


def resolve_augment(data: DataConfig, dataset: ArrayDataset) -> AugmentConfig:
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
    return AugmentConfig(
        image_size=side,
        max_shift=shift,
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
    dtype: torch.dtype = torch.float32,
) -> Loader:
    """The DALI loader of one rank, from arrays or from image files.

    Views are of `dtype` where one launch makes them (small pictures on a GPU), else float32.

    Raises `ConfigError` when the batch cannot be shared equally or when there are more ranks than
    labeled or unlabeled images; `UserError` when DALI is not installed.
    """
    layout = rank_layout(
        data, labeled_views=labeled_views, strong_views=strong_views, world_size=world_size
    )
    for kind, count in (("labeled", len(split.labeled)), ("unlabeled", len(split.unlabeled))):
        if count < world_size:
            raise ConfigError(
                f"{count} {kind} images cannot be shared by {world_size} ranks; "
                f"use at most {count} ranks or more images"
            )
    arguments: dict[str, Any] = {
        "layout": layout,
        "augment": resolve_augment(data, dataset),
        "seed": seed,
        "rank": rank,
        "world_size": world_size,
        "device": device,
        "start_step": start_step,
        "num_threads": num_threads,
    }
    if isinstance(dataset, ImageListDataset) and dataset.in_files:
        return FileLoader(data, dataset, split, **arguments)
    return ArrayLoader(data, dataset, split, **arguments, dtype=dtype)
