"""Crops of image files: where they lie, how they are drawn, how they are scaled."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from simpro_fast.config.data import Fit
from simpro_fast.data.augment.crops import (
    Square,
    crop_words,
    placed,
    random_crops,
    whole_box,
    whole_square,
)
from simpro_fast.data.sampling.draws import WORDS_PER_VIEW, Stream, raw_words
from tests.data.image_folders import picture

SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
GOLDEN = [[2.457149, 7.159225, 28.071404, 32.945205], [24.761681, 1.592702, 53.401164, 34.165253]]


def boxes(n: int, width: int, height: int, seed: int = 1, fit: Fit = "crop") -> np.ndarray:
    draws = crop_words(seed, Stream.AUGMENT_LABELED, 0, start=0, count=n, num_views=1)
    sizes = np.full(n, width), np.full(n, height)
    return random_crops(draws, *sizes, scale=SCALE, ratio=RATIO, fit=fit)


def test_draws_are_the_spare_words_of_the_views() -> None:
    words = raw_words(3, Stream.AUGMENT_LABELED, 5, count=4 * WORDS_PER_VIEW)
    spare = words.reshape(4, WORDS_PER_VIEW)[:, 5:]
    draws = crop_words(3, Stream.AUGMENT_LABELED, 5, start=0, count=4, num_views=1)
    assert draws.shape == (4, 14)
    assert np.array_equal(draws[:, ::2] * 2.0**32, (spare & 0xFFFFFFFF).astype(np.float64))
    assert np.array_equal(draws[:, 1::2] * 2.0**32, (spare >> 32).astype(np.float64))


def test_slices_views_and_seeds() -> None:
    """A rank's slice is a slice; every view, step, stream and seed has its own numbers."""

    def draw(seed: int = 1, stream: Stream = Stream.AUGMENT_LABELED, step: int = 0, **k: int):  # type: ignore[no-untyped-def]
        return crop_words(seed, stream, step, **{"start": 0, "count": 8, "num_views": 2, **k})

    whole = draw().reshape(2, 8, 14)
    half = draw(start=3, count=5).reshape(2, 5, 14)
    assert np.array_equal(whole[:, 3:], half)
    assert np.array_equal(draw(num_views=1), whole[0])
    variants = [draw(), draw(seed=2), draw(step=1), draw(stream=Stream.AUGMENT_UNLABELED)]
    values = np.concatenate(variants).ravel()
    assert len(np.unique(values)) > len(values) - 3


def test_boxes_never_change() -> None:
    """Part of a run's identity: other numbers would break resumed and recorded runs."""
    assert boxes(2, 60, 40).round(6).tolist() == GOLDEN


def test_boxes_are_inside_and_have_the_promised_shape() -> None:
    n = 4000
    box = boxes(n, 60, 50)
    w, h = box[:, 2] - box[:, 0], box[:, 3] - box[:, 1]
    assert (box[:, :2] >= 0).all() and (box[:, 2] <= 60).all() and (box[:, 3] <= 50).all()
    area, aspect = w * h / 3000, w / h
    assert area.min() >= SCALE[0] - 1e-9 and area.max() <= SCALE[1] + 1e-9
    assert aspect.min() >= RATIO[0] - 1e-9 and aspect.max() <= RATIO[1] + 1e-9
    # small boxes always fit, so their law is the plain one
    small = area < 0.55
    assert stats.kstest(area[small], stats.uniform(0.2, 0.35).cdf).pvalue > 1e-3
    span = np.log(RATIO[1]) - np.log(RATIO[0])
    log_uniform = stats.uniform(np.log(RATIO[0]), span)
    assert stats.kstest(np.log(aspect[small]), log_uniform.cdf).pvalue > 1e-3
    for corner, free in ((box[:, 0], 60 - w), (box[:, 1], 50 - h)):
        room = free > 1
        assert stats.kstest(corner[room] / free[room], "uniform").pvalue > 1e-3


@pytest.mark.parametrize(("width", "height"), [(400, 10), (10, 400), (1, 1)])
def test_narrow_images_are_cut(width: int, height: int) -> None:
    box = boxes(200, width, height)
    w, h = box[:, 2] - box[:, 0], box[:, 3] - box[:, 1]
    assert (w > 0).all() and (h > 0).all()
    assert (box >= 0).all() and (box[:, 2] <= width).all() and (box[:, 3] <= height).all()


def test_centre_box() -> None:
    assert whole_box(60, 40, "crop") == (10, 0, 50, 40)
    assert whole_box(40, 61, "crop") == (0, 10.5, 40, 50.5)


def test_resize_of_the_centre_is_resize_of_the_shorter_side_and_a_crop() -> None:
    image = picture(4, 96, 64)
    assert np.array_equal(
        whole_square(image, Square(32)),
        np.asarray(image.resize((48, 32), Image.Resampling.BILINEAR))[:, 8:40],
    )


@pytest.mark.parametrize(("width", "height"), [(60, 20), (20, 60), (50, 50), (400, 1)])
def test_padded_crops_hold_the_picture_or_lie_in_it(width: int, height: int) -> None:
    box, sides = boxes(2000, width, height, fit="pad"), (width, height)
    for axis, side in enumerate(sides):
        low, high = box[:, axis], box[:, 2 + axis]
        longer = high - low > side
        assert (low[longer] <= 0).all() and (high[longer] >= side).all()
        assert (low[~longer] >= 0).all() and (high[~longer] <= side + 1e-9).all()
    area = np.prod(box[:, 2:] - box[:, :2], axis=1) / max(sides) ** 2
    assert area.min() >= SCALE[0] - 1e-9 and area.max() <= 1 + 1e-9, "of the square with bars"
    cut, place = placed(box, np.full(2000, width), np.full(2000, height), 32)
    assert (cut >= 0).all() and (cut[:, :2] < cut[:, 2:]).all() and (cut[:, 2:] <= sides).all()
    assert (place >= 0).all() and (place[:, :2] < place[:, 2:]).all() and (place <= 32).all()


def test_squashed_crops_are_those_of_the_stretched_picture() -> None:
    assert np.allclose(boxes(50, 60, 20, fit="squash"), boxes(50, 1, 1) * (60, 20, 60, 20))


def test_bars_are_as_wide_on_both_sides_and_normalise_to_nothing() -> None:
    mean = (0.485, 0.456, 0.406)
    square = Square.of(32, "pad", "bilinear", mean)
    white = Image.new("RGB", (64, 36), "white")
    seen = whole_square(white, square)
    assert (seen[:7] == square.fill).all() and (seen[25:] == square.fill).all()
    assert (seen[7:25] == 255).all(), "18 of 32 rows"
    assert np.abs(seen[0] / 255 - mean).max() <= 0.5 / 255
    assert np.array_equal(whole_square(white.rotate(90, expand=True), square), seen.swapaxes(0, 1))
    assert (whole_square(white, Square(32, "squash")) == 255).all()
    assert (whole_square(Image.new("RGB", (500, 1), "white"), square)[16] == 255).all()
    assert Square.of(32, "crop", "bilinear", mean) == Square(32)
