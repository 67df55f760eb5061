"""Crops of image files: where they lie, how they are drawn, how they are scaled."""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from simpro_fast.data.augment.crops import centre_crop, crop_words, random_crops, resize_crop
from simpro_fast.data.sampling.draws import WORDS_PER_VIEW, Stream, raw_words
from tests.data.image_folders import picture

SCALE, RATIO = (0.2, 1.0), (3 / 4, 4 / 3)
GOLDEN = [[2.457149, 7.159225, 28.071404, 32.945205], [24.761681, 1.592702, 53.401164, 34.165253]]


def boxes(n: int, width: int, height: int, seed: int = 1) -> np.ndarray:
    draws = crop_words(seed, Stream.AUGMENT_LABELED, 0, start=0, count=n, num_views=1)
    sizes = np.full(n, width), np.full(n, height)
    return random_crops(draws, *sizes, scale=SCALE, ratio=RATIO)


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
    assert centre_crop(60, 40) == (10, 0, 50, 40)
    assert centre_crop(40, 61) == (0, 10.5, 40, 50.5)


def test_resize_of_the_centre_is_resize_of_the_shorter_side_and_a_crop() -> None:
    image = picture(4, 96, 64)
    assert np.array_equal(
        resize_crop(image, centre_crop(96, 64), 32),
        np.asarray(image.resize((48, 32), Image.Resampling.BILINEAR))[:, 8:40],
    )
