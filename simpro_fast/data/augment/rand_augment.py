"""The strong policy: RandAugment of the published code (n = 2 of 14 operations) and cutout.

`strong_policy` is one batch function: uint8 images [N, H, W, 3] and a parameter table to uint8
images. The parameters live on the host, so rows are grouped by kind of operation without a
synchronisation, and what the device must know of them travels in one copy. The four kinds are
tables of the image's own histogram, blends of the image with a duller one, bit operations and
geometric ones. It runs on the images' device and equals Pillow bit for bit.

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from simpro_fast.data.augment import pixel_ops
from simpro_fast.data.sampling.draws import LEVELS, LOWEST_LEVEL, OPERATIONS_PER_VIEW, AugmentParams

PARAMETER_MAX = 10
CUTOUT_COLOUR = 127
TABLE_COLUMNS = 3 * OPERATIONS_PER_VIEW + 4


class Operation(IntEnum):
    """The operations (`NUM_OPERATIONS` in draws.py), drawn uniformly.

    Numbers are part of a run's identity.
    """

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


_GEOMETRIC = range(Operation.ROTATE, Operation.TRANSLATE_Y + 1)
_TABLES = (Operation.AUTO_CONTRAST, Operation.EQUALIZE)
_BLENDS = (Operation.CONTRAST, Operation.BRIGHTNESS, Operation.COLOR, Operation.SHARPNESS)
_BITS = (Operation.POSTERIZE, Operation.SOLARIZE)
_KINDS = (_TABLES, _BLENDS, _BITS, tuple(Operation(operation) for operation in _GEOMETRIC))
_SORTED = [operation for kind in _KINDS for operation in kind]
_PLACE = np.array([_SORTED.index(op) if op in _SORTED else len(_SORTED) for op in Operation])
"""Place of each operation when rows are sorted by kind; IDENTITY comes last and is left out."""
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
def _factors(device: torch.device) -> Tensor:
    """Factor of the blends by level: float32 [10]."""
    factors = np.array([enhance_factor(level) for level in range(_LEVEL_SLOTS)], np.float32)
    return torch.from_numpy(factors).to(device)


def _bit_constants() -> np.ndarray:
    """Of each operation and level, int64 [14, 10, 2]: values above the second number are
    inverted, then masked with the first."""
    constants = np.full((len(Operation), _LEVEL_SLOTS, 2), 255)
    for level in range(_LEVEL_SLOTS):
        constants[Operation.POSTERIZE, level, 0] -= (1 << (4 - scaled_int(level, 4))) - 1
        constants[Operation.SOLARIZE, level, 1] -= scaled_int(level, 256)
    return constants


_BIT_CONSTANTS = _bit_constants()


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


def strong_table(draws: AugmentParams, *, cutout: int, width: int, height: int) -> np.ndarray:
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
    out = images.clone(memory_format=torch.contiguous_format)
    apply_strong_policy(out, table)
    return out


def apply_strong_policy(images: Tensor, table: np.ndarray) -> None:
    """`strong_policy` in place, for contiguous images."""
    if images.dtype != torch.uint8 or images.dim() != 4 or images.shape[3] != 3:
        raise ValueError(f"images must be uint8 [N, H, W, 3], got {images.dtype} {images.shape}")
    if table.shape != (len(images), TABLE_COLUMNS):
        raise ValueError(f"table must be [{len(images)}, {TABLE_COLUMNS}], got {table.shape}")
    rounds = [
        _Round.of(*table[:, first : first + 3].T) for first in range(0, 3 * OPERATIONS_PER_VIEW, 3)
    ]
    boxes = table[:, -4:]
    host = images.device.type == "cpu"
    arrays = [array for one in rounds for array in (one.rows, one.levels, one.bits, one.maps)]
    moved = to_device(arrays if host else [*arrays, boxes.T], images.device)
    for one in rounds:
        _apply_round(images, one, *(next(moved) for _ in range(4)))
    if host:
        # Five times as fast as a mask over all pixels.
        for image, (x0, y0, x1, y1) in zip(images.numpy(), boxes.tolist(), strict=True):
            if x0 <= x1:
                image[y0 : y1 + 1, x0 : x1 + 1] = CUTOUT_COLOUR
    else:
        pixel_ops.fill_boxes(images, next(moved), CUTOUT_COLOUR)


def to_device(arrays: Sequence[np.ndarray], device: torch.device) -> Iterator[Tensor]:
    """Integer arrays of the host as int64 tensors of the same shapes: one copy, without waiting."""
    flat = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays], dtype=np.int64))
    if device.type == "cuda":
        flat = flat.pin_memory()
    parts = flat.to(device, non_blocking=True).split([array.size for array in arrays])
    return (part.view(array.shape) for part, array in zip(parts, arrays, strict=True))


@dataclass(frozen=True)
class _Round:
    """One operation for each image, planned on the host."""

    counts: dict[Operation, int]
    """Images of each operation, in the order of `rows`."""
    kinds: list[slice]
    """The part of `rows` of each kind of operation."""
    rows: np.ndarray
    """[g]: the images that change, sorted by operation."""
    levels: np.ndarray
    """Level of each blend."""
    bits: np.ndarray
    """[2, n]: mask and threshold of each bit operation, see `_bit_constants`."""
    maps: np.ndarray
    """Row of `_geometry_table` of each geometric operation."""

    @classmethod
    def of(cls, operation: np.ndarray, level: np.ndarray, negative: np.ndarray) -> _Round:
        place = _PLACE[operation]
        counts = dict(zip(_SORTED, np.bincount(place, minlength=len(Operation)), strict=False))
        ends = np.cumsum([sum(counts[op] for op in kind) for kind in _KINDS]).tolist()
        kinds = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        rows = np.argsort(place, kind="stable")[: ends[-1]]
        operation, level, negative = operation[rows], level[rows], negative[rows]
        _, blends, bits, geometric = kinds
        return cls(
            {operation: int(count) for operation, count in counts.items()},
            kinds,
            rows,
            level[blends],
            _BIT_CONSTANTS[operation[bits], level[bits]].T,
            _geometry_row(operation[geometric], level[geometric], negative[geometric]),
        )


def _apply_round(
    images: Tensor, one: _Round, rows: Tensor, levels: Tensor, bits: Tensor, maps: Tensor
) -> None:
    """One operation per image, in place; the tensors are those arrays of `one` on the device."""
    height, width = images.shape[1:3]

    def change(part: slice, function: Callable[[Tensor], Tensor]) -> None:
        if part.start < part.stop:
            chosen = rows[part]
            images.index_copy_(0, chosen, function(images.index_select(0, chosen)))

    def blend(pixels: Tensor) -> Tensor:
        counts = [one.counts[operation] for operation in _BLENDS]
        return pixel_ops.blend(pixels, counts, _factors(images.device).index_select(0, levels))

    def move(pixels: Tensor) -> Tensor:
        table = _geometry_table(width, height, images.device)
        return pixel_ops.gather_pixels(pixels, table.index_select(0, maps))

    tables, blends, bit_operations, geometric = one.kinds
    auto_contrast = one.counts[Operation.AUTO_CONTRAST]
    change(tables, lambda pixels: pixel_ops.stretch_or_equalize(pixels, auto_contrast))
    change(blends, blend)
    change(bit_operations, lambda pixels: pixel_ops.invert_and_mask(pixels, *bits.unbind()))
    change(geometric, move)
