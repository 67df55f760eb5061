"""The one function that builds a loader, and how it reads the configuration."""

from __future__ import annotations

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import AugmentConfig, Loader, LoaderSettings
from simpro_fast.data.datasets.base import ArrayDataset
from simpro_fast.data.datasets.image_list import ImageListDataset
from simpro_fast.data.features import FeatureDataset, FeatureLoader
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


def build_loader(settings: LoaderSettings, dataset: ArrayDataset, split: Split) -> Loader:
    """The DALI loader of one rank, from arrays or from image files.

    Raises `ConfigError` when the batch cannot be shared equally or when there are more ranks than
    labeled or unlabeled images; `UserError` when DALI is not installed.
    """
    for kind, count in (("labeled", len(split.labeled)), ("unlabeled", len(split.unlabeled))):
        if count < settings.world_size:
            raise ConfigError(
                f"{count} {kind} images cannot be shared by {settings.world_size} ranks; "
                f"use at most {count} ranks or more images"
            )
    if isinstance(dataset, FeatureDataset):
        return FeatureLoader(settings, dataset, split)
    augment = resolve_augment(settings.data, dataset)
    if isinstance(dataset, ImageListDataset) and dataset.in_files:
        return FileLoader(settings, dataset, split, augment)
    return ArrayLoader(settings, dataset, split, augment)
