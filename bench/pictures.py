"""JPEG files of photographic size for benches: smooth random colours with some detail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

WIDTH, HEIGHT = 500, 375


def write_pictures(
    folder: Path, *, classes: int = 4, labeled: int = 8, unlabeled: int = 64
) -> tuple[Path, Path]:
    """Write `classes` folders of `labeled` images each and `unlabeled` ones.

    Returns:
        The folders to give as `data.labeled` and `data.unlabeled`. JPEG quality 90, 500 x 375.
    """
    generator = np.random.default_rng(0)
    names = [f"labeled/class{k}/{i}.jpg" for k in range(classes) for i in range(labeled)]
    names += [f"unlabeled/{i}.jpg" for i in range(unlabeled)]
    for name in names:
        coarse = Image.fromarray(generator.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        fine = Image.fromarray(generator.integers(0, 256, (96, 128, 3), dtype=np.uint8))
        smooth, detail = (
            image.resize((WIDTH, HEIGHT), Image.Resampling.BICUBIC) for image in (coarse, fine)
        )
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.blend(smooth, detail, 0.2).save(path, quality=90)
    return folder / "labeled", folder / "unlabeled"
