"""The square that evaluation, packing and prediction see of a picture: one rule for all of them."""

from __future__ import annotations

import numpy as np

from simpro_fast.data.augment.crops import Square, whole_square
from simpro_fast.data.files.decode import ImageSource, read_rgb
from simpro_fast.data.files.manifest import Row
from simpro_fast.utils.errors import UserError


def read_square(
    source: ImageSource, square: Square, listed: tuple[int, int] | None = None
) -> np.ndarray:
    """The square of an image by the rule of augment/crops.py.

    Args:
        source: file or member of a shard.
        listed: width and height that the picture must have.

    Returns:
        uint8 [size, size, 3].

    Raises:
        UserError: as `read_rgb`.
    """
    return whole_square(read_rgb(source, listed), square)


def row_square(row: Row, square: Square) -> np.ndarray:
    """`read_square` of a row of a manifest.

    Raises:
        UserError: as `read_rgb`, with the cure.
    """
    try:
        return read_square(row.image, square, (row.width, row.height))
    except UserError as error:
        raise UserError(
            f"{error}; restore it, or run simpro-fast prepare --on-bad-image skip"
        ) from None
