"""Crops of image files: float boxes, drawn or computed on the host, and the one way to resize.

Training, evaluation and packing all take a box (x0, y0, x1, y1) in pixels of the upright image
and scale it to the network's square with an antialiased bilinear filter: Pillow's
`resize(size, BILINEAR, box)`, which DALI's resize with a region of interest equals within 1
(outer ring of boxes that touch the edge aside).
"""

from __future__ import annotations

import numpy as np
from PIL import Image

from simpro_fast.data.sampling.draws import MASK32, WORDS_PER_VIEW, Stream, raw_words

_FIRST_WORD = 5  # words 0..4 of a view belong to the policy
_TRIES = 6
_UNIT = 2.0**-32


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
) -> np.ndarray:
    """Random-resized crops (Szegedy et al., "Going deeper with convolutions", CVPR 2015).

    Area uniform in `scale` of the image's, width over height log-uniform in `ratio`, place
    uniform; nothing is rounded to pixels. The first of six tries that fits into the image is
    taken; where none does (a long narrow image), the last is cut to the image.

    Args:
        draws: [n, 14] of `crop_words`. width, height: [n], pixels.

    Returns:
        float64 [n, 4]: x0, y0, x1, y1 with 0 <= x0 < x1 <= width, likewise y.
    """
    tries = draws[:, : 2 * _TRIES].reshape(len(draws), _TRIES, 2)
    w_image, h_image = (np.asarray(side, np.float64)[:, None] for side in (width, height))
    area = w_image * h_image * (scale[0] + (scale[1] - scale[0]) * tries[:, :, 0])
    low, high = np.log(ratio)
    aspect = np.exp(low + (high - low) * tries[:, :, 1])
    w, h = np.sqrt(area * aspect), np.sqrt(area / aspect)
    fits = (w <= w_image) & (h <= h_image)
    chosen = np.where(fits.any(axis=1), fits.argmax(axis=1), _TRIES - 1)
    rows = np.arange(len(draws))
    w = np.minimum(w[rows, chosen], w_image[:, 0])
    h = np.minimum(h[rows, chosen], h_image[:, 0])
    x, y = (w_image[:, 0] - w) * draws[:, -2], (h_image[:, 0] - h) * draws[:, -1]
    return np.stack([x, y, x + w, y + h], axis=1)


def centre_crop(width: int, height: int) -> tuple[float, float, float, float]:
    """The largest centred square: what evaluation and packing see of an image.

    The same as resizing the shorter side to the network's and cropping the centre, in one step.
    """
    side = min(width, height)
    x, y = (width - side) / 2, (height - side) / 2
    return (x, y, x + side, y + side)


def resize_crop(
    image: Image.Image, box: tuple[float, float, float, float], size: int
) -> np.ndarray:
    """uint8 [size, size, 3] of a part of an RGB image."""
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))
