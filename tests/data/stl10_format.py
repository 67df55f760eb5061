"""Writes STL-10 files in the published format: planes column after column, labels 1 to 10."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import numpy as np

FOLDER = "stl10_binary"


def stl10_members(per_class: int = 3, test: int = 1, unlabeled: int = 40) -> dict[str, bytes]:
    """The archive's files by name; classes take turns. Unlabeled images are bright."""
    rng = np.random.default_rng(0)

    def part(count: int, low: int = 0) -> bytes:
        images = rng.integers(low, 256, (count, 96, 96, 3)).astype(np.uint8)
        return images.transpose(0, 3, 2, 1).tobytes()

    return {
        "train_X.bin": part(10 * per_class),
        "train_y.bin": bytes(1 + i % 10 for i in range(10 * per_class)),
        "test_X.bin": part(10 * test),
        "test_y.bin": bytes(1 + i % 10 for i in range(10 * test)),
        "unlabeled_X.bin": part(unlabeled, low=200),
        "class_names.txt": b"airplane\nbird\n",
        "fold_indices.txt": b"0 1 2\n",
    }


def write_stl10(root: Path, members: dict[str, bytes]) -> Path:
    folder = root / FOLDER
    folder.mkdir(parents=True)
    for name, content in members.items():
        (folder / name).write_bytes(content)
    return folder


def write_stl10_archive(root: Path, members: dict[str, bytes]) -> Path:
    path = root / "stl10_binary.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=1) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(f"{FOLDER}/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path
