"""Pixel operations of the strong policy on batches uint8 [g, H, W, 3], equal to Pillow's.

Sums are integers below 2**24 held in float32, hence exact in any order; products that Pillow
takes in single precision are taken in single precision, with no fused multiply-add (multiply
and add are separate calls). Nothing here synchronises with the host.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def stretch_or_equalize(images: Tensor, auto_contrast: int) -> Tensor:
    """Auto-contrast of the first `auto_contrast` images, histogram equalisation of the others."""
    index = _table_index(images)
    tables = torch.cat(
        [
            auto_contrast_tables(images[:auto_contrast]),
            equalize_tables(images[auto_contrast:], index[auto_contrast:] - 768 * auto_contrast),
        ]
    )
    return tables.view(-1).index_select(0, index.view(-1)).view(images.shape)


def gather_pixels(images: Tensor, pixels: Tensor) -> Tensor:
    """Output pixel p of image i is input pixel pixels[i, p]; index H*W is black.

    Args:
        pixels: int32 [g, H*W], values 0..H*W.
    """
    g, height, width, channels = images.shape
    source = images.new_zeros(g, height * width + 1, channels)
    source[:, :-1] = images.view(g, height * width, channels)
    first = torch.arange(g, dtype=torch.int32, device=images.device) * (height * width + 1)
    index = (pixels + first[:, None]).view(-1)
    return source.view(-1, channels).index_select(0, index).view(images.shape)


def auto_contrast_tables(images: Tensor) -> Tensor:
    """Stretch each channel's range to 0..255: uint8 [g, 3, 256]; one-valued channels unchanged."""
    low = images.amin(1).amin(1).double()[..., None]
    high = images.amax(1).amax(1).double()[..., None]
    identity = torch.arange(256, dtype=torch.float64, device=images.device)
    # torch takes number / tensor as number * (1 / tensor), which rounds differently.
    scale = torch.full_like(low, 255.0) / (high - low).clamp_min(1)
    stretched = (identity * scale).add_(-low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, identity).to(torch.uint8)


def equalize_tables(images: Tensor, index: Tensor) -> Tensor:
    """Pillow's histogram equalisation of each channel: uint8 [g, 3, 256].

    With histogram h: step = (sum h - h[last non-zero]) // 255 and
    table[v] = (step // 2 + sum_{j<v} h[j]) // step, at most 255; unchanged where step is 0,
    which covers channels of a single value.

    Args:
        index: `_table_index` of the images.
    """
    histogram = torch.zeros(len(images) * 3 * 256, dtype=torch.int32, device=images.device)
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand(index.numel())
    histogram = histogram.index_add_(0, index.view(-1), ones).view(len(images), 3, 256)
    total = images.shape[1] * images.shape[2]
    last = images.amax(1).amax(1).long()[..., None]
    step = (total - histogram.gather(2, last)) // 255
    before = histogram.cumsum(2, dtype=torch.int32) - histogram
    table = ((step // 2 + before) // step.clamp_min(1)).clamp_max_(255)
    identity = torch.arange(256, dtype=torch.int32, device=images.device)
    return torch.where(step > 0, table, identity).to(torch.uint8)


def blend(images: Tensor, counts: Sequence[int], factors: Tensor) -> Tensor:
    """trunc(dull + factor * (image - dull)) in float32, for factors in 0..1.

    Args:
        counts: how many images, in this order, get contrast (the dull image is the rounded mean
            of the grey one), brightness (black), colour (the grey image) and sharpness (the
            image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13, but for its border).
        factors: float32 [g].
    """
    pixels = images.float()
    dull = torch.empty_like(pixels)
    for part, fill, source in zip(
        dull.split(counts),
        (_fill_mean, _fill_black, _fill_grey, _fill_smooth),
        pixels.split(counts),
        strict=True,
    ):
        fill(part, source)
    dull = dull.view(len(images), -1)
    blended = pixels.view(dull.shape).sub_(dull).mul_(factors[:, None]).add_(dull)
    return blended.to(torch.uint8).view(images.shape)


def invert_and_mask(images: Tensor, masks: Tensor, thresholds: Tensor) -> Tensor:
    """Invert the values above each image's threshold, then keep the bits of its mask.

    Args:
        masks, thresholds: integers 0..255 [g].
    """
    flat = images.view(len(images), -1)
    above = flat > thresholds.to(torch.uint8)[:, None]
    inverted = above.view(torch.uint8).neg_().bitwise_xor_(flat)  # 255 where above, else 0
    return inverted.bitwise_and_(masks.to(torch.uint8)[:, None]).view(images.shape)


def fill_boxes(images: Tensor, edges: Tensor, value: int) -> None:
    """Fill each image's box, both ends included, in place. edges: [4, N], x0, y0, x1, y1."""
    left, top, right, bottom = edges[:, :, None].unbind()
    x = torch.arange(images.shape[2], device=images.device)
    y = torch.arange(images.shape[1], device=images.device)
    in_x, in_y = (x >= left) & (x <= right), (y >= top) & (y <= bottom)
    images.masked_fill_((in_y[:, :, None] & in_x[:, None, :])[..., None], value)


def grey(pixels: Tensor) -> Tensor:
    """ITU-R 601 luma, (19595 R + 38470 G + 7471 B + 2**15) >> 16, of float32 [g, H, W, 3]."""
    red, green, blue = pixels.unbind(-1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return luma.add_(32768).mul_(1 / 65536).floor_()


def _fill_mean(dull: Tensor, pixels: Tensor) -> None:
    count = pixels.shape[1] * pixels.shape[2]
    total = grey(pixels).sum((1, 2), dtype=torch.float64)
    dull.copy_((total / count + 0.5).floor_()[:, None, None, None])


def _fill_black(dull: Tensor, pixels: Tensor) -> None:
    dull.zero_()


def _fill_grey(dull: Tensor, pixels: Tensor) -> None:
    dull.copy_(grey(pixels)[..., None])


def _fill_smooth(dull: Tensor, pixels: Tensor) -> None:
    dull.copy_(pixels)
    if min(pixels.shape[1:3]) < 3:
        return
    columns = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    sums = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:]
    # k / 13 is never within 1/26 of a half, so the rounding of the division cannot matter.
    smooth = sums.add_(pixels[:, 1:-1, 1:-1], alpha=4).div_(13).add_(0.5).floor_()
    dull[:, 1:-1, 1:-1] = smooth


def _table_index(images: Tensor) -> Tensor:
    """Index int32 [g, H*W*3] of each value in the images' tables laid out as [g * 3 * 256]."""
    first = torch.arange(0, 768, 256, dtype=torch.int32, device=images.device)
    tables = torch.arange(0, 768 * len(images), 768, dtype=torch.int32, device=images.device)
    index = images.view(len(images), -1).int()
    return index.add_(first.repeat(index.shape[1] // 3)).add_(tables[:, None])
