"""Whether the data set of a configuration is there, and gives the split that it asks for."""

from __future__ import annotations

from pathlib import Path

from simpro_fast.cli.checks.table import Line
from simpro_fast.config import Config
from simpro_fast.config.data import DataConfig
from simpro_fast.data.datasets.imagenet import IMAGENET, check_tree
from simpro_fast.data.datasets.registry import load_dataset
from simpro_fast.data.datasets.small_imagenet import find_files
from simpro_fast.data.datasets.stl10 import find_stl10
from simpro_fast.data.files.scan_shards import expand
from simpro_fast.data.splits.build import make_split
from simpro_fast.distributed.process_group import Ranks
from simpro_fast.training.setup import resolved_data
from simpro_fast.utils.errors import UserError

LONG_MANIFEST = 20 * 2**20
"""Bytes, some 100,000 images: each is looked at, which the other ranks would wait for."""


def check_data(config: Config, ranks: Ranks) -> Line:
    """Load and split the set, once on each host.

    What would first be copied (STL-10, small ImageNet) or looked at image by image (folders without
    a manifest, long manifests) is only looked for: it takes minutes, and training does it once.
    """
    if ranks.local_rank:
        return Line("skipped", "by the first rank of each host")
    found = found_only(config.data)
    if found is not None:
        return Line("ok", f"{found}; not read here, so its split is not checked")
    dataset = load_dataset(resolved_data(config)[0])
    split = make_split(config.data, dataset, config.seed)
    return Line(
        "ok",
        f"{config.data.name}: {len(split.labeled):,} labeled and {len(split.unlabeled):,} "
        f"unlabeled images of {dataset.num_classes} classes, {len(split.test):,} to test on",
    )


def found_only(data: DataConfig) -> str | None:
    """Path of a set that is not loaded here; None: it is small enough to be loaded."""
    if data.name == "stl10":
        return f"stl10 is in {find_stl10(data)}"
    if data.name.startswith("small_imagenet_"):
        return f"{data.name} is in {find_files(data)[0].parent}"
    if data.manifest is not None:
        long = data.manifest.is_file() and data.manifest.stat().st_size > LONG_MANIFEST
        return f"{data.manifest} is there, and long" if long else None
    if data.name in IMAGENET:
        return f"{data.name} is in {check_tree(data)}"
    if data.name != "images":
        return None
    given = [data.labeled, *data.unlabeled, data.val]
    places = [place for root in given if root is not None for place in expand(root)]
    for place in places:
        if not Path(place).exists():
            raise UserError(f"{place}: no such folder or shard; see data.labeled and its like")
    return f"{len(places)} folder(s) or shard(s) of own images are there"
