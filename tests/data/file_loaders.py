"""Loaders of image files and shards for the tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from simpro_fast.config.data import DataConfig
from simpro_fast.data.batch import Batch
from simpro_fast.data.datasets.image_list import load_own_images
from simpro_fast.data.loader import build_loader
from simpro_fast.data.pipeline.file_loader import FileLoader
from simpro_fast.data.splits.listed import listed_split

SIDE, BATCH, MU, L, V = 24, 4, 2, 2, 2
M = BATCH * MU


@contextmanager
def loader(
    root: Path,
    *,
    seed: int = 1,
    rank: int = 0,
    world: int = 1,
    start: int = 0,
    num_threads: int = 1,
    **changes: Any,
) -> Iterator[FileLoader]:
    ending = "" if (root / "labeled").is_dir() else "-*.tar"
    folders = {part: root / f"{part}{ending}" for part in ("labeled", "unlabeled")}
    settings = {"image_size": SIDE, "batch_size": BATCH, "mu": MU, "cutout": 0}
    data = DataConfig(**{"name": "images", **folders, **settings, **changes})
    dataset = load_own_images(data)
    made = build_loader(
        data,
        dataset,
        listed_split(data, dataset),
        labeled_views=L,
        strong_views=V,
        seed=seed,
        rank=rank,
        world_size=world,
        device=torch.device("cpu"),
        start_step=start,
        num_threads=num_threads,
    )
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
