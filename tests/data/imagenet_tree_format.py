"""Writes a small ImageNet in the published layout: train/<wnid>/*.JPEG and val/<wnid>/*.JPEG."""

from __future__ import annotations

from pathlib import Path

from simpro_fast.data.datasets.imagenet_classes import class_list
from tests.data.image_folders import picture, save


def write_imagenet_tree(root: Path, per_class: int, val_classes: int = 1000) -> Path:
    """All 1000 folders of `train` with the same few pictures; one image of each class in `val`."""
    root.mkdir(parents=True, exist_ok=True)
    kinds = [save(root / f"{i}.jpg", picture(i, 20 + i, 18)).read_bytes() for i in range(4)]
    for number, wnid in enumerate(class_list().wnids):
        train, val = root / "train" / wnid, root / "val" / wnid
        train.mkdir(parents=True)
        for i in range(per_class):
            (train / f"{wnid}_{i}.JPEG").write_bytes(kinds[i % 3])
        if number < val_classes:
            val.mkdir(parents=True)
            (val / "ILSVRC2012_val_0.JPEG").write_bytes(kinds[3])
    return root
