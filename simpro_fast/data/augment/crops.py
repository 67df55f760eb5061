"""How a picture becomes the network's square: float boxes, drawn or computed on the host, scaled.

Training, evaluation and packing all take a box (x0, y0, x1, y1) in pixels of the upright image,
scale what of it lies in the image with an antialiased filter, and fill the rest of the square:
Pillow's `resize(size, BILINEAR or BICUBIC, box)`. DALI's resize with a region of interest equals it
within 1, but for the outer ring of boxes that touch an edge (bicubic: two pixels of the picture),
and for bicubic overshoots beyond 0 .. 255, which Pillow clips between its two passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from simpro_fast.config.data import DataConfig, Fit, Interpolation
from simpro_fast.data.sampling.draws import MASK32, WORDS_PER_VIEW, Stream, raw_words

_FIRST_WORD = 5  # words 0..4 of a view belong to the policy
_TRIES = 6
_UNIT = 2.0**-32
RESAMPLING: dict[Interpolation, Image.Resampling] = {
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Square:
    """How pictures become squares; the same for training, evaluation and prediction."""

    size: int
    """Side, pixels."""
    fit: Fit = "crop"
    """As `data.fit`."""
    interpolation: Interpolation = "bilinear"
    fill: tuple[int, int, int] = (0, 0, 0)
    """Colour of the bars of `pad`, RGB; (0, 0, 0) where there are none."""

    @classmethod
    def of(cls, size: int, fit: Fit, interpolation: Interpolation, mean: Sequence[float]) -> Square:
        """Make one whose bars have the colour that normalises to 0 (`mean`, scale 0 .. 1)."""
        red, green, blue = (min(255, max(0, round(255 * value))) for value in mean)
        return cls(size, fit, interpolation, (red, green, blue) if fit == "pad" else (0, 0, 0))

    @classmethod
    def configured(cls, data: DataConfig, size: int, mean: Sequence[float]) -> Square:
        """Make the one that the section `data` asks for.

        Args:
            mean: of the set, where `data.mean` is None.
        """
        return cls.of(size, data.fit, data.interpolation or "bilinear", data.mean or mean)


def crop_words(
    seed: int, stream: Stream, step: int, *, start: int, count: int, num_views: int
) -> np.ndarray:
    """Uniform numbers in [0, 1) for the crops of a step: float64 [num_views * count, 14].

    They are the spare words of the views' draws (sampling/draws.py), in the same order: a box
    depends on (seed, stream, step, place in the global batch, view) and on the size of its image,
    on nothing else.
    """
    words = np.concatenate(
        [
            raw_words(
                seed,
                stream,
                step,
                start_block=start * WORDS_PER_VIEW // 4,
                count=count * WORDS_PER_VIEW,
                lane=view,
            ).reshape(count, WORDS_PER_VIEW)[:, _FIRST_WORD:]
            for view in range(num_views)
        ]
    )
    return np.stack([words & MASK32, words >> np.uint64(32)], axis=2).reshape(len(words), -1) * (
        _UNIT
    )


def random_crops(
    draws: np.ndarray,
    width: np.ndarray,
    height: np.ndarray,
    *,
    scale: tuple[float, float],
    ratio: tuple[float, float],
    fit: Fit = "crop",
) -> np.ndarray:
    """Random-resized crops (Szegedy et al., "Going deeper with convolutions", CVPR 2015).

    Area uniform in `scale` of the image's, width over height log-uniform in `ratio`, place
    uniform; nothing is rounded to pixels. The first of six tries that fits into the image is
    taken; where none does (a long narrow image), the last is cut to the image.

    The image is with `squash` the stretched one, so that crops are stretched as what evaluation
    sees. With `pad` it is the square with bars: area and shape are drawn of that, but a crop that
    is longer than the picture in one direction holds all of it there, in a uniform place, and a
    shorter one lies inside it, so that none is of bars alone.

    Args:
        draws: [n, 14] of `crop_words`. width, height: [n], pixels.

    Returns:
        float64 [n, 4]: x0, y0, x1, y1 with 0 <= x0 < x1 <= width, likewise y; with `pad` also
        x0 <= 0 < width <= x1.
    """
    tries = draws[:, : 2 * _TRIES].reshape(len(draws), _TRIES, 2)
    w_picture, h_picture = (np.asarray(side, np.float64)[:, None] for side in (width, height))
    if fit == "squash":
        w_picture = h_picture = np.ones((len(draws), 1))
    w_image, h_image = w_picture, h_picture
    if fit == "pad":
        w_image = h_image = np.maximum(w_picture, h_picture)
    area = w_image * h_image * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * tries[:, :, 1])
    w, h = np.sqrt(area * aspect), np.sqrt(area / aspect)
    fits = (w <= w_image) & (h <= h_image)
    chosen = np.where(fits.any(axis=1), fits.argmax(axis=1), _TRIES - 1)
    rows = np.arange(len(draws))
    w = np.minimum(w[rows, chosen], w_image[:, 0])
    h = np.minimum(h[rows, chosen], h_image[:, 0])
    x, y = (w_picture[:, 0] - w) * draws[:, -2], (h_picture[:, 0] - h) * draws[:, -1]
    boxes = np.stack([x, y, x + w, y + h], axis=1)
    return boxes * np.stack([width, height] * 2, axis=1) if fit == "squash" else boxes


def whole_box(width: int, height: int, fit: Fit) -> Box:
    """What evaluation and packing see of an image; the box of `pad` reaches beyond it.

    That of `crop` is the same as resizing the shorter side to the network's and cropping the
    centre, in one step.
    """
    if fit == "squash":
        return (0, 0, width, height)
    side = (max if fit == "pad" else min)(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    return (x, y, x + side, y + side)


def placed(
    boxes: np.ndarray, width: np.ndarray, height: np.ndarray, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Cut boxes to their images, and find where in the square what is left of them goes.

    Args:
        boxes: float64 [n, 4], each with a part in its image.
        width, height: [n], pixels of the images.
        size: side of the square.

    Returns:
        the boxes cut, float64 [n, 4], and their places, int64 [n, 4]: x0, y0, x1, y1 in pixels of
        the square, at least one each way. Of boxes inside their images the place is all of it.
    """
    low, high = boxes[:, :2], boxes[:, 2:]
    first, last = np.maximum(low, 0), np.minimum(high, np.stack([width, height], axis=1))
    start = np.minimum(np.rint((first - low) * size / (high - low)), size - 1)
    end = np.maximum(np.rint((last - low) * size / (high - low)), start + 1)
    place = np.concatenate([start, end], axis=1).astype(np.int64)
    return np.concatenate([first, last], axis=1), place


def resize_crop(image: Image.Image, box: Box, square: Square) -> np.ndarray:
    """uint8 [size, size, 3] of a part of an RGB image."""
    width, height = (np.array([side]) for side in image.size)
    (cut,), ((x0, y0, x1, y1),) = placed(np.array([box]), width, height, square.size)
    part = image.resize((x1 - x0, y1 - y0), RESAMPLING[square.interpolation], box=tuple(cut))
    if part.size == (square.size, square.size):
        return np.asarray(part)
    canvas = Image.new("RGB", (square.size, square.size), square.fill)
    canvas.paste(part, (x0, y0))
    return np.asarray(canvas)


def whole_square(image: Image.Image, square: Square) -> np.ndarray:
    """uint8 [size, size, 3]: what evaluation sees of an RGB image."""
    return resize_crop(image, whole_box(*image.size, square.fit), square)
