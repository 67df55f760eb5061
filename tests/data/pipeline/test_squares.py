"""How pictures become squares: training's decoder and Pillow agree, whatever fit and filter."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from simpro_fast.config.data import Fit, Interpolation
from simpro_fast.data.augment.crops import Square, placed, resize_crop, whole_square
from simpro_fast.data.datasets.image_list import MEAN, STD
from simpro_fast.data.files.decode import read_rgb
from tests.data.file_loaders import BATCH, SIDE, M, loader
from tests.data.image_folders import picture, save

PARTS = ("labeled/a", "labeled/b", "unlabeled")
SIZES = {"tall": (40, 120), "wide": (120, 40), "tiny": (5, 3), "film": (160, 90), "line": (90, 2)}
FEW_PIXELS = ("tiny", "line")
FITS: tuple[Fit, ...] = ("crop", "pad", "squash")
INTERPOLATIONS: tuple[Interpolation, ...] = ("bilinear", "bicubic")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pictures of odd shapes, one of them lying on its side."""
    root = tmp_path_factory.mktemp("odd")
    exif = Image.Exif()
    exif[0x0112] = 6
    for part in PARTS:
        for name, size in SIZES.items():
            save(root / part / f"{name}.png", picture(len(name), *size))
        save(root / part / "turned.jpg", picture(9, 90, 50), exif=exif, quality=95)
    return root


def weak_views(root: Path, steps: int, **changes: Any) -> list[tuple[np.ndarray, Any, str]]:
    """Weak views of unlabeled images, float32 0 .. 255, with box and path."""
    found = []
    with loader(root, flip=False, **changes) as made:
        for step in range(steps):
            views, told = made.next(step).views[-3 * M : -2 * M], made.describe(step)
            pixels = (views.permute(0, 2, 3, 1).numpy() * np.float32(STD) + np.float32(MEAN)) * 255
            found += zip(pixels, told["unlabeled_boxes"], told["paths"][BATCH:], strict=False)
    return found


@pytest.mark.parametrize(("fit", "interpolation"), list(product(FITS, INTERPOLATIONS)))
def test_views_are_what_pillow_makes(odd: Path, fit: Fit, interpolation: Interpolation) -> None:
    """Within 1 but for the border of the picture, where decoders continue it differently.

    The bicubic border of a picture of few pixels is all of it.
    """
    square, seen = Square.of(SIDE, fit, interpolation, MEAN), set()
    for view, box, path in weak_views(odd, 8, fit=fit, interpolation=interpolation):
        image, name = read_rgb(Path(path)), Path(path).stem
        difference = np.abs(view - resize_crop(image, box, square)).max(axis=2)
        width, height = (np.array([side]) for side in image.size)
        x0, y0, x1, y1 = placed(np.array([box]), width, height, SIDE)[1][0]
        inside = difference[y0 + 2 : y1 - 2, x0 + 2 : x1 - 2].max(initial=0)
        assert inside < (5 if interpolation == "bicubic" and name in FEW_PIXELS else 1.01), name
        assert difference.max() < 14, name
        difference[y0:y1, x0:x1] = 0
        assert difference.max() < 0.01, "bars have one colour"
        seen.add(name)
    assert seen == {*SIZES, "turned"}


def test_crops_of_everything_are_what_evaluation_sees(odd: Path) -> None:
    """Stretched alike; between bars, in another place."""
    whole = {"weak_scale": (1, 1), "crop_ratio": (1, 1)}
    for view, _, path in weak_views(odd, 2, fit="squash", **whole):
        expected = whole_square(read_rgb(Path(path)), Square(SIDE, "squash"))
        assert np.abs(view - expected).mean() < 2
    square = Square.of(SIDE, "pad", "bilinear", MEAN)
    for view, _, path in weak_views(odd, 2, fit="pad", **whole):
        expected = whole_square(read_rgb(Path(path)), square)
        views = (view, expected)
        drawn, evaluated = (np.isclose(of, square.fill, atol=0.01).all(2) for of in views)
        assert abs(drawn.mean() - evaluated.mean()) < 0.1, Path(path).stem


def test_what_stands_at_the_edge_is_seen_with_pad_and_not_with_crop(tmp_path: Path) -> None:
    """A red spot at the right of a 16:9 picture, in every view of training and in evaluation."""
    pixels = np.zeros((90, 160, 3), np.uint8)
    pixels[30:60, 140:] = (255, 0, 0)
    for part in PARTS:
        for number in range(3):
            save(tmp_path / part / f"{number}.png", Image.fromarray(pixels))

    def red(view: np.ndarray) -> bool:
        return bool(((view[..., 0] > 200) & (view[..., 1] < 60)).any())

    whole = {"weak_scale": (1, 1), "crop_ratio": (1, 1)}
    for fit, expected in (("crop", False), ("pad", True), ("squash", True)):
        with loader(tmp_path, fit=fit) as made:
            images = made._dataset.images
            assert {red(image) for image in images[:4]} == {expected}, fit
        if fit != "crop":
            assert all(red(view) for view, *_ in weak_views(tmp_path, 1, fit=fit, **whole))
