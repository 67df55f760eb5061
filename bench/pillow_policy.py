"""The strong policy image by image with Pillow: baseline of the benches, oracle of the tests.

Written from the published description (RandAugment n = 2 of 14 operations, levels 1..9, each
applied with probability 1/2, then cutout); parameters come from outside, so that a batch
implementation can be compared view by view.
"""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

OPERATIONS = (
    "identity",
    "auto_contrast",
    "equalize",
    "contrast",
    "brightness",
    "posterize",
    "solarize",
    "color",
    "sharpness",
    "rotate",
    "shear_x",
    "shear_y",
    "translate_x",
    "translate_y",
)


def apply_operation(image: Image.Image, name: str, level: int, negative: bool) -> Image.Image:
    sign = -1 if negative else 1
    factor = float(level) * 0.9 / 10 + 0.05
    amount = sign * (float(level) * 0.3 / 10)

    def affine(*coefficients: float) -> Image.Image:
        return image.transform(image.size, Image.Transform.AFFINE, coefficients)

    if name == "identity":
        return image
    if name == "auto_contrast":
        return ImageOps.autocontrast(image)
    if name == "equalize":
        return ImageOps.equalize(image)
    if name == "contrast":
        return ImageEnhance.Contrast(image).enhance(factor)
    if name == "brightness":
        return ImageEnhance.Brightness(image).enhance(factor)
    if name == "posterize":
        return ImageOps.posterize(image, int(level * 4 / 10) + 4)
    if name == "solarize":
        return ImageOps.solarize(image, 256 - int(level * 256 / 10))
    if name == "color":
        return ImageEnhance.Color(image).enhance(factor)
    if name == "sharpness":
        return ImageEnhance.Sharpness(image).enhance(factor)
    if name == "rotate":
        return image.rotate(sign * int(level * 30 / 10))
    if name == "shear_x":
        return affine(1, amount, 0, 0, 1, 0)
    if name == "shear_y":
        return affine(1, 0, 0, amount, 1, 0)
    if name == "translate_x":
        return affine(1, 0, int(amount * image.size[0]), 0, 1, 0)
    if name == "translate_y":
        return affine(1, 0, 0, 0, 1, int(amount * image.size[1]))
    raise KeyError(name)


def cutout(image: Image.Image, centre: tuple[float, float], side: int) -> Image.Image:
    """centre: (y, x) in pixels. The far corner counts from the clipped near one."""
    if side == 0:
        return image
    width, height = image.size
    x0 = int(max(0, centre[1] - side / 2.0))
    y0 = int(max(0, centre[0] - side / 2.0))
    x1, y1 = int(min(width, x0 + side)), int(min(height, y0 + side))
    image = image.copy()
    ImageDraw.Draw(image).rectangle((x0, y0, x1, y1), (127, 127, 127))
    return image


def crop_flip(image: np.ndarray, shift: tuple[int, int], flip: bool, pad: int) -> np.ndarray:
    """Flip, reflect-pad, crop at (y, x); uint8 [H, W, 3]."""
    height, width = image.shape[:2]
    flipped = image[:, ::-1] if flip else image
    padded = np.pad(flipped, ((pad, pad), (pad, pad), (0, 0)), mode="reflect")
    y, x = shift
    return padded[y : y + height, x : x + width]


def strong_view(
    image: np.ndarray,
    *,
    operation: tuple[int, int],
    level: tuple[int, int],
    apply: tuple[bool, bool],
    negative: tuple[bool, bool],
    cutout_centre: tuple[float, float],
    cutout_side: int,
) -> np.ndarray:
    """The strong policy on one weakly augmented image, uint8 [H, W, 3]."""
    view = Image.fromarray(np.ascontiguousarray(image))
    for index, value, coin, minus in zip(operation, level, apply, negative, strict=True):
        if coin:
            view = apply_operation(view, OPERATIONS[index], value, minus)
    return np.asarray(cutout(view, cutout_centre, cutout_side))
