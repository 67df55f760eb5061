"""What a view is made of: the columns of a view plan, the 14 operations and their constants.

A view plan is int32 [v, 14] on the host; row r says how view r is made:

    0         image: which one of those at hand
    1         flip: 1 mirrors horizontally, before the crop
    2, 3      shift: offset (y, x) of the crop in the reflect-padded image, 0..2 * max_shift
    4, 5, 6   first operation: number, level 1..9, 1 for a negative sign
    7, 8, 9   second operation
    10..13    cutout box x0, y0, x1, y1, both ends included; empty where x0 > x1

The operations are those of RandAugment in the published code of SimPro and FixMatch. With level v
and u = v / 10:

    brightness, colour, contrast, sharpness    factor 0.9 u + 0.05
    posterize                                  keep int(4 u) + 4 bits
    solarize                                   invert from 256 - int(256 u) on
    rotate                                     +-int(30 u) degrees about the centre
    shear x / y                                +-0.3 u, origin top left
    translate x / y                            +-int(0.3 u * side) pixels
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from enum import IntEnum

import torch

LOWEST_LEVEL, LEVELS = 1, 9
"""Levels 1..9; the published code draws below its upper end of 10."""
OPERATIONS_PER_VIEW = 2
CUTOUT_COLOUR = 127

IMAGE, FLIP, SHIFT = 0, 1, slice(2, 4)
POLICY = slice(4, 14)
"""Columns of the strong policy: two operations and the cutout."""
PLAN_COLUMNS = 14
POLICY_COLUMNS = POLICY.stop - POLICY.start

LEVEL_SLOTS = LOWEST_LEVEL + LEVELS
"""Tables are indexed by the level itself."""
CONSTANTS = 6
"""Numbers that an operation may need, see `operation_constants`."""
_PARAMETER_MAX = 10


class Operation(IntEnum):
    """The 14 operations; a draw picks one uniformly. Numbers are part of a run's identity."""

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


TABLES = (Operation.AUTO_CONTRAST, Operation.EQUALIZE)
BLENDS = (Operation.CONTRAST, Operation.BRIGHTNESS, Operation.COLOR, Operation.SHARPNESS)
BITS = (Operation.POSTERIZE, Operation.SOLARIZE)
GEOMETRIC = tuple(Operation)[Operation.ROTATE :]


def enhance_factor(level: int) -> float:
    """Factor of brightness, colour, contrast and sharpness; 1 would leave the image as it is."""
    return _scaled_float(level, 0.9) + 0.05


def mask_and_threshold(operation: Operation, level: int) -> tuple[int, int]:
    """Of posterize and solarize: values above the threshold are inverted, then masked."""
    if operation is Operation.POSTERIZE:
        return 255 - ((1 << (4 - _scaled_int(level, 4))) - 1), 255
    return 255, 255 - _scaled_int(level, 256)


def fixed_point_map(
    operation: Operation, level: int, negative: bool, width: int, height: int
) -> tuple[int, int, int, int, int, int]:
    """Input pixel of an output pixel in Pillow's 16.16 fixed point, taken at pixel centres.

    Returns:
        (x0, xx, xy, y0, yx, yy): x_in = (x0 + xx * x + xy * y) >> 16, y_in = (y0 + yx * x + ...).
    """
    a, b, c, d, e, f = _affine_coefficients(operation, level, negative, width, height)

    def fixed(value: float) -> int:
        return math.floor(value * 65536.0 + 0.5)

    return (
        fixed(c + a * 0.5 + b * 0.5), fixed(a), fixed(b),
        fixed(f + d * 0.5 + e * 0.5), fixed(d), fixed(e),
    )  # fmt: skip


def shift_and_scale(mean: Sequence[float], std: Sequence[float]) -> tuple[list[float], list[float]]:
    """Per channel, what (x / 255 - mean) / std subtracts from x and multiplies it with.

    The mean and the inverse of the standard deviation, times 255 and rounded to float32 where
    DALI's `crop_mirror_normalize` rounds them on a CPU, so that both normalise to the same bits.
    """
    shift = torch.tensor([255.0 * value for value in mean], dtype=torch.float32)
    scale = torch.tensor([255.0 * value for value in std], dtype=torch.float32).reciprocal_()
    return shift.tolist(), scale.tolist()


def operation_constants(width: int, height: int) -> list[list[list[tuple[int, ...]]]]:
    """What a kernel must know of every operation, level and sign: int32 [14, 10, 2, 6].

    Geometric operations: `fixed_point_map`. Blends: the factor, the bits of a float32. Bit
    operations: mask and threshold. The rest is 0.
    """

    def constants(operation: Operation, level: int, negative: bool) -> tuple[int, ...]:
        if operation in GEOMETRIC:
            return fixed_point_map(operation, level, negative, width, height)
        if operation in BLENDS:
            used: tuple[int, ...] = struct.unpack("i", struct.pack("f", enhance_factor(level)))
        elif operation in BITS:
            used = mask_and_threshold(operation, level)
        else:
            used = ()
        return used + (0,) * (CONSTANTS - len(used))

    return [
        [
            [constants(operation, level, bool(sign)) for sign in (0, 1)]
            for level in range(LEVEL_SLOTS)
        ]
        for operation in Operation
    ]


def _scaled_float(level: int, largest: float) -> float:
    """level / 10 of `largest`, in the order of operations of the published code."""
    return float(level) * largest / _PARAMETER_MAX


def _scaled_int(level: int, largest: int) -> int:
    """The same, truncated."""
    return int(level * largest / _PARAMETER_MAX)


def _affine_coefficients(
    operation: Operation, level: int, negative: bool, width: int, height: int
) -> tuple[float, float, float, float, float, float]:
    """(a, b, c, d, e, f) of the map from output to input: x_in = a x + b y + c, y_in = d x + ..."""
    sign = -1 if negative else 1
    if operation is Operation.ROTATE:
        angle = -math.radians(sign * _scaled_int(level, 30) % 360.0)
        cos, sin = round(math.cos(angle), 15), round(math.sin(angle), 15)
        minus_sin = round(-math.sin(angle), 15)
        x, y = width / 2, height / 2
        return (
            cos, sin, cos * -x + sin * -y + 0.0 + x,
            minus_sin, cos, minus_sin * -x + cos * -y + 0.0 + y,
        )  # fmt: skip
    amount = sign * _scaled_float(level, 0.3)
    if operation is Operation.SHEAR_X:
        return (1.0, amount, 0.0, 0.0, 1.0, 0.0)
    if operation is Operation.SHEAR_Y:
        return (1.0, 0.0, 0.0, amount, 1.0, 0.0)
    if operation is Operation.TRANSLATE_X:
        return (1.0, 0.0, float(int(amount * width)), 0.0, 1.0, 0.0)
    return (1.0, 0.0, 0.0, 0.0, 1.0, float(int(amount * height)))
