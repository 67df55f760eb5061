"""Folders of real pictures, tidy and messy, for the tests of own data sets."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_image


@lru_cache(maxsize=2)
def _photo(name: str) -> np.ndarray:
    return load_sample_image(name)


def picture(number: int, width: int = 44, height: int = 36, kind: int = 0) -> Image.Image:
    """A cut-out of one of two photographs; another number is another picture."""
    photo = _photo(("china.jpg", "flower.jpg")[kind % 2])
    rng = np.random.default_rng(number)
    y = int(rng.integers(photo.shape[0] - height))
    x = int(rng.integers(photo.shape[1] - width))
    return Image.fromarray(photo[y : y + height, x : x + width])


def save(path: Path, image: Image.Image, **options: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, **options)
    return path


def tidy(root: Path, labeled: tuple[int, ...] = (5, 4, 3), unlabeled: int = 24) -> Path:
    """`labeled/{cats,dogs,owls}`, an unlabeled folder and `val`, JPEG and PNG of several sizes."""
    number = 0
    for k, (name, count) in enumerate(zip(("cats", "dogs", "owls"), labeled, strict=True)):
        for i in range(count):
            number += 1
            ending = "png" if i % 3 == 2 else "jpg"
            image = picture(number, 40 + 3 * i, 36 + 2 * k, kind=k)
            save(root / "labeled" / name / f"{i}.{ending}", image)
        for i in range(2):
            number += 1
            save(root / "val" / name / f"{i}.jpg", picture(number, kind=k))
    for i in range(unlabeled):
        number += 1
        save(
            root / "unlabeled" / f"{i:03}.jpg", picture(number, 36 + i % 5, 40, kind=i), quality=90
        )
    return root


def every_kind(root: Path) -> Path:
    """A tidy set with every kind of file that is read."""
    tidy(root, unlabeled=12)
    unlabeled = root / "unlabeled"
    for orientation in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        save(unlabeled / f"turned{orientation}.jpg", picture(200 + orientation, 60, 38), exif=exif)
    save(unlabeled / "grey.jpg", picture(220).convert("L"))
    save(unlabeled / "cmyk.jpg", picture(221).convert("CMYK"))
    save(unlabeled / "palette ü.PNG", picture(222).quantize(40))
    save(unlabeled / "alpha.png", picture(223).convert("RGBA"))
    save(unlabeled / "w.webp", picture(224))
    save(unlabeled / "b.bmp", picture(225))
    return root


def cut(path: Path, source: Path, fraction: float = 0.5) -> Path:
    """The first part of a good file, as a copy that was interrupted leaves it."""
    content = source.read_bytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content[: int(len(content) * fraction)])
    return path
