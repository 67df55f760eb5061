"""Writes small CIFAR archives of the published layout, pickled with protocol 2.

The bytes that Python 2 wrote are read in test_safe_pickle.py.
"""

from __future__ import annotations

import io
import pickle
import tarfile
from pathlib import Path

import numpy as np


def pickled(value: object) -> bytes:
    return pickle.dumps(value, protocol=2)


def cifar_images(count: int, seed: int) -> np.ndarray:
    """uint8 [count, 3072], channel-planar as in the archive."""
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def cifar10_members(per_class: int = 2) -> dict[str, bytes]:
    """The archive's files by name; every batch holds `per_class` images of each class."""
    members = {
        "batches.meta": pickled(
            {
                "num_cases_per_batch": 10 * per_class,
                "label_names": [f"class {k}" for k in range(10)],
                "num_vis": 3072,
            }
        )
    }
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        members[name] = pickled(
            {
                "batch_label": f"batch {seed}",
                "labels": list(range(10)) * per_class,
                "data": cifar_images(10 * per_class, seed),
                "filenames": [f"image_{i}.png" for i in range(10 * per_class)],
            }
        )
    return members


def cifar100_members(per_class: int = 1) -> dict[str, bytes]:
    """`per_class` images of each of the 100 classes in both parts."""
    count = 100 * per_class
    members = {
        "meta": pickled(
            {
                "fine_label_names": [f"fine {k}" for k in range(100)],
                "coarse_label_names": [f"coarse {k}" for k in range(20)],
            }
        )
    }
    for seed, name in enumerate(["train", "test"]):
        members[name] = pickled(
            {
                "filenames": [f"image_{i}.png" for i in range(count)],
                "batch_label": f"{name} part",
                "fine_labels": list(range(100)) * per_class,
                "coarse_labels": [k % 20 for k in range(100)] * per_class,
                "data": cifar_images(count, seed),
            }
        )
    return members


def write_folder(root: Path, folder: str, members: dict[str, bytes]) -> None:
    (root / folder).mkdir(parents=True)
    for name, content in members.items():
        (root / folder / name).write_bytes(content)
    (root / folder / "readme.html").write_text("not a pickle")


def write_archive(root: Path, archive: str, folder: str, members: dict[str, bytes]) -> None:
    with tarfile.open(root / archive, "w:gz") as tar:
        top = tarfile.TarInfo(folder)
        top.type = tarfile.DIRTYPE
        tar.addfile(top)
        for name, content in {"readme.html": b"not a pickle", **members}.items():
            member = tarfile.TarInfo(f"{folder}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
