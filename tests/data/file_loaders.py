"""Loaders of image files and shards for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import Batch, LoaderSettings
from simpro_fast.data.datasets.image_list import ImageListDataset
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline.file_loader import FileLoader
from simpro_fast.data.splits.listed import listed_split

SIDE, BATCH, MU, L, V = 24, 4, 2, 2, 2
M = BATCH * MU
_OF_LOADER = ("seed", "rank", "world_size", "num_threads")


@contextmanager
def loader(
    root: Path,
    *,
    start: int = 0,
    **changes: Any,
) -> Iterator[FileLoader]:
    ending = "" if (root / "labeled").is_dir() else "-*.tar"
    folders = {part: root / f"{part}{ending}" for part in ("labeled", "unlabeled")}
    settings = {"image_size": SIDE, "batch_size": BATCH, "mu": MU, "cutout": 0}
    of_loader = {key: changes.pop(key) for key in _OF_LOADER if key in changes}
    data = DataConfig(**{"name": "images", **folders, **settings, **changes})
    dataset = load_dataset(data)
    assert isinstance(dataset, ImageListDataset)
    built = LoaderSettings(
        data=data, labeled_views=L, strong_views=V, start_step=start, **of_loader
    )
    made = build_loader(built, dataset, listed_split(data, dataset))
    assert isinstance(made, FileLoader)
    try:
        yield made
    finally:
        made.close()


def batches(root: Path, steps: int, **arguments: Any) -> list[Batch]:
    start = arguments.get("start", 0)
    with loader(root, **arguments) as made:
        return [made.next(step) for step in range(start, start + steps)]


def assert_same(a: Batch, b: Batch) -> None:
    assert a.step == b.step
    for name in ("views", "targets", "truth"):
        assert torch.equal(getattr(a, name), getattr(b, name)), name
