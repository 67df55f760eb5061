"""Pixel operations of the strong policy on batches uint8 [g, H, W, 3], equal to Pillow's.

Sums are integers below 2**24 held in float32, hence exact in any order; products that Pillow
takes in single precision are taken in single precision, with no fused multiply-add (multiply
and add are separate calls). Nothing here synchronises with the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def look_up(images: Tensor, tables: Tensor) -> Tensor:
    """images [g, H, W, 3] through tables uint8 [g, 3, 256], one gather."""
    index = _table_index(images)
    return tables.reshape(len(images), -1).gather(1, index).view(images.shape)


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
    flat = images.view(len(images), -1, 3)
    low = flat.amin(1).double()[..., None]
    high = flat.amax(1).double()[..., None]
    identity = torch.arange(256, dtype=torch.float64, device=images.device)
    # torch takes number / tensor as number * (1 / tensor), which rounds differently.
    scale = torch.full_like(low, 255.0) / (high - low).clamp_min(1)
    stretched = (identity * scale).add_(-low * scale).clamp_(0, 255)
    return torch.where(high > low, stretched, identity).to(torch.uint8)


def equalize_tables(images: Tensor) -> Tensor:
    """Pillow's histogram equalisation of each channel: uint8 [g, 3, 256].

    With histogram h: step = (sum h - h[last non-zero]) // 255 and
    table[v] = (step // 2 + sum_{j<v} h[j]) // step, at most 255; unchanged where step is 0,
    which covers channels of a single value.
    """
    index = _table_index(images)
    ones = torch.ones((), dtype=torch.int32, device=images.device).expand_as(index)
    histogram = torch.zeros(len(images), 3 * 256, dtype=torch.int32, device=images.device)
    histogram = histogram.scatter_add_(1, index, ones).view(-1, 3, 256)
    total = histogram.sum(2, keepdim=True, dtype=torch.int32)
    last = images.view(len(images), -1, 3).amax(1).long()[..., None]
    step = (total - histogram.gather(2, last)) // 255
    before = histogram.cumsum(2, dtype=torch.int32) - histogram
    table = ((step // 2 + before) // step.clamp_min(1)).clamp_max_(255)
    identity = torch.arange(256, dtype=torch.int32, device=images.device)
    return torch.where(step > 0, table, identity).to(torch.uint8)


def contrast_tables(images: Tensor, factors: Tensor) -> Tensor:
    """Blend towards the rounded mean of the grey image: uint8 [g, 1, 256], for all channels."""
    pixels = images.shape[1] * images.shape[2]
    total = grey(images).view(len(images), -1).sum(1, dtype=torch.float64)
    mean = (total / pixels + 0.5).floor_().float()[:, None]
    identity = torch.arange(256, dtype=torch.float32, device=images.device)
    return _blend(mean, identity, factors[:, None])[:, None]


def color(images: Tensor, factors: Tensor) -> Tensor:
    """Blend towards the grey image; factor 0 is grey, 1 the image. factors: float32 [g]."""
    return _blend(grey(images)[..., None], images.float(), factors[:, None, None, None])


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend towards the image smoothed by [1 1 1; 1 5 1; 1 1 1] / 13; the border is kept."""
    out = images.clone()
    if min(images.shape[1:3]) < 3:
        return out
    pixels = images.float()
    columns = pixels[:, :-2] + pixels[:, 1:-1] + pixels[:, 2:]
    sums = columns[:, :, :-2] + columns[:, :, 1:-1] + columns[:, :, 2:]
    centre = pixels[:, 1:-1, 1:-1]
    # k / 13 is never within 1/26 of a half, so the rounding of the division cannot matter.
    smooth = sums.add_(centre, alpha=4).div_(13).add_(0.5).floor_()
    out[:, 1:-1, 1:-1] = _blend(smooth, centre, factors[:, None, None, None])
    return out


def grey(images: Tensor) -> Tensor:
    """ITU-R 601 luma, (19595 R + 38470 G + 7471 B + 2**15) >> 16: float32 [g, H, W], integers."""
    red, green, blue = images.float().unbind(-1)
    luma = (red * 19595).add_(green, alpha=38470).add_(blue, alpha=7471)
    return luma.add_(32768).mul_(1 / 65536).floor_()


def _blend(degenerate: Tensor, image: Tensor, factor: Tensor) -> Tensor:
    """trunc(degenerate + factor * (image - degenerate)) in float32, for factors in 0..1."""
    return (image - degenerate).mul_(factor).add_(degenerate).to(torch.uint8)


def _table_index(images: Tensor) -> Tensor:
    """Index int64 [g, H*W*3] of each value in its image's tables laid out as [3 * 256]."""
    first = torch.arange(0, 768, 256, device=images.device).repeat(images[0].numel() // 3)
    return images.view(len(images), -1).long().add_(first)
