"""The eager twin of the kernel: plain PyTorch, any device; numpy plans the work on the host.

The images come once, [n, H, W, 3]; a view plan on the host (see operations.py) says which views to
make of them. Padding is a matter of indices, so nobody keeps padded images. As the plan is on the
host, rows are grouped by kind of operation without a synchronisation, and what the device must know
of them travels in two copies. The four kinds are tables of the image's own histogram, blends of the
image with a duller one, bit operations and geometric ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from simpro_kernels.augment import pixel_ops
from simpro_kernels.augment.operations import (
    BITS,
    BLENDS,
    CUTOUT_COLOUR,
    FLIP,
    GEOMETRIC,
    IMAGE,
    LEVEL_SLOTS,
    LEVELS,
    LOWEST_LEVEL,
    OPERATIONS_PER_VIEW,
    POLICY,
    POLICY_COLUMNS,
    SHIFT,
    TABLES,
    Operation,
    enhance_factor,
    fixed_point_map,
    mask_and_threshold,
    shift_and_scale,
)
from torch import Tensor

_KINDS = (TABLES, BLENDS, BITS, GEOMETRIC)
_SORTED = [operation for kind in _KINDS for operation in kind]
_PLACE = np.array([_SORTED.index(op) if op in _SORTED else len(_SORTED) for op in Operation])
"""Place of each operation when rows are sorted by kind; IDENTITY comes last and is left out."""


def augment_views(
    images: Tensor,  # [n, H, W, 3]
    plan: Tensor,  # [v, 14]
    *,
    max_shift: int,
    mean: Sequence[float],
    std: Sequence[float],
    dtype: torch.dtype,
) -> Tensor:
    """The views, [v, H, W, 3]; see ``op.py``."""
    views = make_views(images, plan.numpy(), max_shift=max_shift)
    shift, scale = (torch.tensor(row).to(images.device) for row in shift_and_scale(mean, std))
    return views.float().sub_(shift).mul_(scale).to(dtype)


def make_views(images: Tensor, plan: np.ndarray, *, max_shift: int) -> Tensor:
    """uint8 [n, H, W, 3] to uint8 [v, H, W, 3], contiguous, on the same device."""
    views = crop_flip(images, plan, max_shift=max_shift)
    apply_strong_policy(views, plan[:, POLICY])
    return views


def crop_flip(images: Tensor, plan: np.ndarray, *, max_shift: int) -> Tensor:
    """The weak views: flip, pad by reflection, crop at `shift` (0..2*max_shift); one gather."""
    count, height, width, channels = images.shape
    device = images.device
    dtype = torch.int32 if count * height * width < 2**31 else torch.int64
    y, x = plan[:, SHIFT].T
    image, rows, columns = to_device(
        [plan[:, IMAGE], y, x + (2 * max_shift + 1) * plan[:, FLIP]],
        device,
    )
    rows = _reflected(height, max_shift, device)[: 2 * max_shift + 1].index_select(0, rows)
    columns = _reflected(width, max_shift, device).index_select(0, columns).to(dtype)
    rows = ((image * height)[:, None] + rows).mul_(width).to(dtype)
    pixels = (rows[:, :, None] + columns[:, None, :]).view(-1)
    out = images.view(-1, channels).index_select(0, pixels)
    return out.view(len(plan), height, width, channels)


@lru_cache(maxsize=8)
def _reflected(side: int, pad: int, device: torch.device) -> Tensor:
    """Pixel behind each place of a line cut from a reflect-padded one, int64 [2 * (2p + 1), side].

    Row s is the cut at offset s; row 2p + 1 + s the same of the mirrored line.
    """
    places = np.abs(np.arange(2 * pad + 1)[:, None] + np.arange(side) - pad)
    places = np.minimum(places, 2 * (side - 1) - places)
    return torch.from_numpy(np.concatenate([places, side - 1 - places])).to(device)


def strong_policy(images: Tensor, table: np.ndarray) -> Tensor:
    """Apply to each image its two operations and its cutout.

    Args:
        images: uint8 [N, H, W, 3], on any device; not changed.
        table: int32 [N, 10] on the host, columns `operations.POLICY` of a view plan.

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
    if table.shape != (len(images), POLICY_COLUMNS):
        raise ValueError(f"table must be [{len(images)}, {POLICY_COLUMNS}], got {table.shape}")
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
        counts = [one.counts[operation] for operation in BLENDS]
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


def _nearest_pixels(pixel_map: tuple[int, ...], width: int, height: int) -> np.ndarray:
    """Flat input pixel of every output pixel, int32 [H*W]; H*W, the fill pixel, where outside.

    Args:
        pixel_map: see `operations.fixed_point_map`.
    """
    x0, xx, xy, y0, yx, yy = pixel_map
    x, y = np.arange(width, dtype=np.int64), np.arange(height, dtype=np.int64)[:, None]
    x_in, y_in = (x0 + x * xx + y * xy) >> 16, (y0 + x * yx + y * yy) >> 16
    inside = (x_in >= 0) & (x_in < width) & (y_in >= 0) & (y_in < height)
    return np.where(inside, y_in * width + x_in, width * height).astype(np.int32).reshape(-1)


def _geometry_row(operation: np.ndarray, level: np.ndarray, negative: np.ndarray) -> np.ndarray:
    """Row of `_geometry_table` for each (operation, level, sign)."""
    return ((operation - GEOMETRIC[0]) * LEVELS + level - LOWEST_LEVEL) * 2 + negative


@lru_cache(maxsize=8)
def _geometry_table(width: int, height: int, device: torch.device) -> Tensor:
    """Input pixels of all geometric operations, levels and signs: int32 [5 * 9 * 2, H*W]."""
    rows = [
        _nearest_pixels(fixed_point_map(operation, level, negative, width, height), width, height)
        for operation in GEOMETRIC
        for level in range(LOWEST_LEVEL, LEVEL_SLOTS)
        for negative in (False, True)
    ]
    return torch.from_numpy(np.stack(rows)).to(device)


@lru_cache(maxsize=8)
def _factors(device: torch.device) -> Tensor:
    """Factor of the blends by level: float32 [10]."""
    factors = np.array([enhance_factor(level) for level in range(LEVEL_SLOTS)], np.float32)
    return torch.from_numpy(factors).to(device)


def _bit_constants() -> np.ndarray:
    """`mask_and_threshold` of each operation and level, int64 [14, 10, 2]."""
    constants = np.full((len(Operation), LEVEL_SLOTS, 2), 255)
    for operation in BITS:
        for level in range(LEVEL_SLOTS):
            constants[operation, level] = mask_and_threshold(operation, level)
    return constants


_BIT_CONSTANTS = _bit_constants()
