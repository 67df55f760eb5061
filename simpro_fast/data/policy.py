"""The strong policy: RandAugment of the published code (n = 2 of 14 operations) and cutout.

`strong_policy` is one batch function: uint8 images [N, H, W, 3] and a parameter table to uint8
images. The parameters live on the host, so rows are grouped by kind of operation without a
synchronisation: all look-up-table operations are one gather, all geometric ones another. It
runs on the images' device and equals Pillow bit for bit.

With level v in 1..9 and u = v / 10 (methods of the released code):

    brightness, colour, contrast, sharpness    factor 0.9 u + 0.05
    posterize                                  keep int(4 u) + 4 bits
    solarize                                   invert from 256 - int(256 u) on
    rotate                                     +-int(30 u) degrees about the centre
    shear x / y                                +-0.3 u, origin top left
    translate x / y                            +-int(0.3 u * side) pixels
"""

from __future__ import annotations

import math
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from simpro_fast.data import policy_ops
from simpro_fast.data.draws import LEVELS, LOWEST_LEVEL, OPERATIONS_PER_VIEW, ViewDraws

PARAMETER_MAX = 10
CUTOUT_COLOUR = 127
TABLE_COLUMNS = 3 * OPERATIONS_PER_VIEW + 4


class Operation(IntEnum):
    """The 14 operations; a draw picks one uniformly. Grouped by kind, see `strong_policy`."""

    IDENTITY = 0
    AUTO_CONTRAST = 1
    EQUALIZE = 2
    CONTRAST = 3
    BRIGHTNESS = 4
    POSTERIZE = 5
    SOLARIZE = 6
    COLOR = 7
    SHARPNESS = 8
    ROTATE = 9
    SHEAR_X = 10
    SHEAR_Y = 11
    TRANSLATE_X = 12
    TRANSLATE_Y = 13


_LOOKUP = range(Operation.AUTO_CONTRAST, Operation.SOLARIZE + 1)
_GEOMETRIC = range(Operation.ROTATE, Operation.TRANSLATE_Y + 1)
_LEVEL_SLOTS = LOWEST_LEVEL + LEVELS  # tables are indexed by the level itself


def scaled_float(level: int, largest: float) -> float:
    """level / 10 of `largest`, in the order of operations of the released code."""
    return float(level) * largest / PARAMETER_MAX


def scaled_int(level: int, largest: int) -> int:
    """The same, truncated."""
    return int(level * largest / PARAMETER_MAX)


def enhance_factor(level: int) -> float:
    """Factor of brightness, colour, contrast and sharpness; 1 would leave the image as it is."""
    return scaled_float(level, 0.9) + 0.05


def affine_coefficients(
    operation: Operation, level: int, negative: bool, width: int, height: int
) -> tuple[float, float, float, float, float, float]:
    """(a, b, c, d, e, f) of the map from output to input: x_in = a x + b y + c, y_in = d x + ..."""
    sign = -1 if negative else 1
    if operation is Operation.ROTATE:
        angle = -math.radians(sign * scaled_int(level, 30) % 360.0)
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        minus_sin = round(-math.sin(angle), 15)
        x, y = width / 2, height / 2
        return (
            cos, sin, cos * -x + sin * -y + 0.0 + x,
            minus_sin, cos, minus_sin * -x + cos * -y + 0.0 + y,
        )  # fmt: skip
    amount = sign * scaled_float(level, 0.3)
    if operation is Operation.SHEAR_X:
        return (1.0, amount, 0.0, 0.0, 1.0, 0.0)
    if operation is Operation.SHEAR_Y:
        return (1.0, 0.0, 0.0, amount, 1.0, 0.0)
    if operation is Operation.TRANSLATE_X:
        return (1.0, 0.0, float(int(amount * width)), 0.0, 1.0, 0.0)
    return (1.0, 0.0, 0.0, 0.0, 1.0, float(int(amount * height)))


def nearest_pixels(
    coefficients: tuple[float, float, float, float, float, float], width: int, height: int
) -> np.ndarray:
    """Flat input pixel of every output pixel, int32 [H*W]; H*W, the fill pixel, where outside.

    Pillow's nearest neighbour in 16.16 fixed point, evaluated at pixel centres.
    """

    def fixed(value: float) -> int:
        return math.floor(value * 65536.0 + 0.5)

    a, b, c, d, e, f = coefficients
    x, y = np.arange(width, dtype=np.int64), np.arange(height, dtype=np.int64)[:, None]
    x_in = (fixed(c + a * 0.5 + b * 0.5) + x * fixed(a) + y * fixed(b)) >> 16
    y_in = (fixed(f + d * 0.5 + e * 0.5) + x * fixed(d) + y * fixed(e)) >> 16
    inside = (x_in >= 0) & (x_in < width) & (y_in >= 0) & (y_in < height)
    return np.where(inside, y_in * width + x_in, width * height).astype(np.int32).reshape(-1)


def _geometry_row(operation: np.ndarray, level: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Row of `_geometry_table` for each (operation, level, sign)."""
    return ((operation - _GEOMETRIC.start) * LEVELS + level - LOWEST_LEVEL) * 2 + negative


@lru_cache(maxsize=8)
def _geometry_table(width: int, height: int, device: torch.device) -> Tensor:
    """Input pixels of all geometric operations, levels and signs: int32 [5 * 9 * 2, H*W]."""
    rows = [
        nearest_pixels(
            affine_coefficients(Operation(operation), level, negative, width, height),
            width,
            height,
        )
        for operation in _GEOMETRIC
        for level in range(LOWEST_LEVEL, LOWEST_LEVEL + LEVELS)
        for negative in (False, True)
    ]
    return torch.from_numpy(np.stack(rows)).to(device)


@lru_cache(maxsize=8)
def _static_lookup(device: torch.device) -> Tensor:
    """Tables that do not depend on the image: uint8 [14 * 10, 256], row operation * 10 + level."""
    identity = np.arange(256)
    table = np.broadcast_to(identity, (len(Operation), _LEVEL_SLOTS, 256)).copy()
    for level in range(LOWEST_LEVEL, LOWEST_LEVEL + LEVELS):
        factor = np.float32(enhance_factor(level))
        table[Operation.BRIGHTNESS, level] = (identity.astype(np.float32) * factor).astype(np.uint8)
        table[Operation.POSTERIZE, level] = identity & ~((1 << (4 - scaled_int(level, 4))) - 1)
        threshold = 256 - scaled_int(level, 256)
        table[Operation.SOLARIZE, level] = np.where(identity < threshold, identity, 255 - identity)
    return torch.from_numpy(table.astype(np.uint8).reshape(-1, 256)).to(device)


_FACTORS = np.array([enhance_factor(level) for level in range(_LEVEL_SLOTS)], np.float32)


def cutout_boxes(centre: np.ndarray, side: int, width: int, height: int) -> np.ndarray:
    """Inclusive boxes int32 [n, 4] = (x0, y0, x1, y1) of the published code's cutout.

    The far edge is counted from the already clipped near one and is part of the box, so a box
    is up to side + 1 pixels wide, and side / 2 + 1 at least. Side 0 gives empty boxes.

    Args:
        centre: float64 [n, 2], (y, x) in pixels.
    """
    if side == 0:
        return np.tile(np.array([0, 0, -1, -1], np.int32), (len(centre), 1))
    near = np.maximum(0.0, centre[:, ::-1] - side / 2).astype(np.int32)
    far = np.minimum(near + side, np.array([width, height]) - 1)
    return np.concatenate([near, far], axis=1).astype(np.int32)


def strong_table(draws: ViewDraws, *, cutout: int, width: int, height: int) -> np.ndarray:
    """The parameter table of `strong_policy`, int32 [n, 10].

    Columns: operation, level, negative of the first and of the second operation (IDENTITY where
    the coin said no), then the cutout box x0, y0, x1, y1, both ends included.
    """
    operation = np.where(draws.apply, draws.operation, Operation.IDENTITY)
    operations = np.stack([operation, draws.level, draws.negative], axis=2)
    return np.concatenate(
        [
            operations.reshape(len(draws), -1).astype(np.int32),
            cutout_boxes(draws.cutout_centre, cutout, width, height),
        ],
        axis=1,
    )


def weak_table(n: int) -> np.ndarray:
    """The table [n, 10] of views that the policy leaves alone."""
    table = np.zeros((n, TABLE_COLUMNS), np.int32)
    table[:, -2:] = -1
    return table


def strong_policy(images: Tensor, table: np.ndarray) -> Tensor:
    """Apply to each image its two operations and its cutout.

    Args:
        images: uint8 [N, H, W, 3], on any device; not changed.
        table: int32 [N, 10] on the host, see `strong_table`.

    Returns:
        uint8 [N, H, W, 3], contiguous, on the same device.
    """
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[3] != 3:
        raise ValueError(f"images must be uint8 [N, H, W, 3], got {images.dtype} {images.shape}")
    if table.shape != (len(images), TABLE_COLUMNS):
        raise ValueError(f"table must be [{len(images)}, {TABLE_COLUMNS}], got {table.shape}")
    out = images.clone(memory_format=torch.contiguous_format)
    for first in range(0, 3 * OPERATIONS_PER_VIEW, 3):
        _apply_round(out, *table[:, first : first + 3].T)
    _apply_cutout(out, table[:, -4:])
    return out


def _apply_round(
    out: Tensor, operation: np.ndarray, level: np.ndarray, negative: np.ndarray
) -> None:
    """One operation per image, in place."""
    height, width = out.shape[1:3]
    device = out.device

    def select(chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        rows = torch.from_numpy(chosen).to(device)
        return rows, out.index_select(0, rows)

    def factors(chosen: np.ndarray) -> Tensor:
        return torch.from_numpy(_FACTORS[level[chosen]]).to(device)

    chosen = np.flatnonzero((operation >= _LOOKUP.start) & (operation < _LOOKUP.stop))
    if chosen.size:
        chosen = chosen[np.argsort(operation[chosen], kind="stable")]
        rows, images = select(chosen)
        ends = np.searchsorted(operation[chosen], list(_LOOKUP), side="right").tolist()
        auto_contrast, equalize, contrast = (
            slice(start, end) for start, end in zip([0, *ends[:2]], ends[:3], strict=True)
        )
        keys = torch.from_numpy(operation[chosen] * _LEVEL_SLOTS + level[chosen]).to(device)
        tables = _static_lookup(device).index_select(0, keys)[:, None].repeat(1, 3, 1)
        if ends[0]:
            tables[auto_contrast] = policy_ops.auto_contrast_tables(images[auto_contrast])
        if ends[1] > ends[0]:
            tables[equalize] = policy_ops.equalize_tables(images[equalize])
        if ends[2] > ends[1]:
            tables[contrast] = policy_ops.contrast_tables(
                images[contrast], factors(chosen[contrast])
            )
        out.index_copy_(0, rows, policy_ops.look_up(images, tables))

    chosen = np.flatnonzero(operation == Operation.COLOR)
    if chosen.size:
        rows, images = select(chosen)
        out.index_copy_(0, rows, policy_ops.color(images, factors(chosen)))

    chosen = np.flatnonzero(operation == Operation.SHARPNESS)
    if chosen.size:
        rows, images = select(chosen)
        out.index_copy_(0, rows, policy_ops.sharpness(images, factors(chosen)))

    chosen = np.flatnonzero(operation >= _GEOMETRIC.start)
    if chosen.size:
        rows, images = select(chosen)
        maps = torch.from_numpy(_geometry_row(operation[chosen], level[chosen], negative[chosen]))
        pixels = _geometry_table(width, height, device).index_select(0, maps.to(device))
        out.index_copy_(0, rows, policy_ops.gather_pixels(images, pixels))


def _apply_cutout(out: Tensor, boxes: np.ndarray) -> None:
    """Fill each image's box, both ends included, in place."""
    if out.device.type == "cpu":
        # Five times as fast as a mask over all pixels.
        for image, (x0, y0, x1, y1) in zip(out.numpy(), boxes.tolist(), strict=True):
            image[y0 : y1 + 1, x0 : x1 + 1] = CUTOUT_COLOUR
        return
    edges = torch.from_numpy(boxes.T.copy()).to(out.device)
    left, top, right, bottom = edges[:, :, None].unbind()
    x = torch.arange(out.shape[2], dtype=torch.int32, device=out.device)
    y = torch.arange(out.shape[1], dtype=torch.int32, device=out.device)
    in_x, in_y = (x >= left) & (x <= right), (y >= top) & (y <= bottom)
    out.masked_fill_((in_y[:, :, None] & in_x[:, None, :])[..., None], CUTOUT_COLOUR)
