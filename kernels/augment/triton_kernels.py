# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""A view per program: gather, flip, crop, two operations, cutout and normalisation in one launch.

Legend: v views of n images of H x W pixels; P is H * W rounded up to a power of two. A picture is
int32 [P], a pixel each: red + green * 2^8 + blue * 2^16. It stays in registers from the first load
to the last store; what moves pixels (`tl.gather`) passes through shared memory.

Sums and products are integers wherever Pillow's result is one. The two places where Pillow's
floating-point rounding shows (blends in float32, auto-contrast in float64) need multiply and add to
round apart: the launcher switches their fusion off.
"""

import triton
import triton.language as tl
from simpro_kernels.augment.operations import (
    CONSTANTS,
    CUTOUT_COLOUR,
    LEVEL_SLOTS,
    OPERATIONS_PER_VIEW,
    PLAN_COLUMNS,
    Operation,
)

_COLUMNS = tl.constexpr(PLAN_COLUMNS)
_OPERATIONS = tl.constexpr(OPERATIONS_PER_VIEW)
_CONSTANTS = tl.constexpr(CONSTANTS)
_LEVELS = tl.constexpr(LEVEL_SLOTS)
_AUTO_CONTRAST = tl.constexpr(int(Operation.AUTO_CONTRAST))
_EQUALIZE = tl.constexpr(int(Operation.EQUALIZE))
_CONTRAST = tl.constexpr(int(Operation.CONTRAST))
_POSTERIZE = tl.constexpr(int(Operation.POSTERIZE))
_SOLARIZE = tl.constexpr(int(Operation.SOLARIZE))
_COLOR = tl.constexpr(int(Operation.COLOR))
_SHARPNESS = tl.constexpr(int(Operation.SHARPNESS))
_FIRST_GEOMETRIC = tl.constexpr(int(Operation.ROTATE))
_ALL_CHANNELS = tl.constexpr(0x010101)
_CUTOUT = tl.constexpr(CUTOUT_COLOUR * 0x010101)


@triton.jit
def channel_of(picture, channel):
    return (picture >> (8 * channel)) & 255


@triton.jit
def reflected(place, SIDE: tl.constexpr):
    """Reflect a coordinate that lies outside by less than the side."""
    place = tl.abs(place)
    return tl.minimum(place, 2 * (SIDE - 1) - place)


@triton.jit
def auto_contrast_table(values, inside):
    """Value to value, int32 [256]: the range of one channel stretched to 0..255."""
    entry = tl.arange(0, 256)
    low = tl.min(tl.where(inside, values, 255), 0)
    high = tl.max(tl.where(inside, values, 0), 0)
    scale = tl.full([], 255.0, tl.float64) / tl.maximum(high - low, 1).to(tl.float64)
    stretched = entry.to(tl.float64) * scale + (-low).to(tl.float64) * scale
    stretched = tl.minimum(tl.maximum(stretched, 0.0), 255.0).to(tl.int32)
    return tl.where(high > low, stretched, entry)


@triton.jit
def equalize_table(values, inside, COUNT: tl.constexpr):
    """Value to value, int32 [256]: Pillow's histogram equalisation of one channel."""
    entry = tl.arange(0, 256)
    last = tl.max(tl.where(inside, values, 0), 0)
    histogram = tl.histogram(values, 256, mask=inside)
    step = (COUNT - tl.sum(tl.where(entry == last, histogram, 0), 0)) // 255
    before = tl.cumsum(histogram, 0) - histogram
    table = tl.minimum((step // 2 + before) // tl.maximum(step, 1), 255)
    return tl.where(step > 0, table, entry)


@triton.jit
def grey_of(picture):
    """ITU-R 601 luma, 0..255."""
    red, green, blue = channel_of(picture, 0), channel_of(picture, 1), channel_of(picture, 2)
    return (red * 19595 + green * 38470 + blue * 7471 + 32768) >> 16


@triton.jit
def smoothed(picture, pixel, x, y, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, P: tl.constexpr):
    """The picture through [1 1 1; 1 5 1; 1 1 1] / 13, rounded; its border stays.

    Sums of three pixels fit in fields of ten bits, so a column takes one addition for all channels.
    """
    above = tl.gather(picture, tl.maximum(pixel - WIDTH, 0), 0)
    below = tl.gather(picture, tl.minimum(pixel + WIDTH, P - 1), 0)
    column = _spread(above) + _spread(picture) + _spread(below)
    left = tl.gather(column, tl.maximum(pixel - 1, 0), 0)
    right = tl.gather(column, tl.minimum(pixel + 1, P - 1), 0)
    smooth = tl.zeros([P], dtype=tl.int32)
    for channel in tl.static_range(3):
        sums = ((left >> (10 * channel)) & 1023) + ((right >> (10 * channel)) & 1023)
        sums += ((column >> (10 * channel)) & 1023) + 4 * channel_of(picture, channel)
        smooth |= ((2 * sums + 13) // 26) << (8 * channel)
    inner = (x > 0) & (x < WIDTH - 1) & (y > 0) & (y < HEIGHT - 1)
    return tl.where(inner, smooth, picture)


@triton.jit
def _spread(picture):
    """Channels 10 bits apart instead of 8."""
    return (picture & 0xFF) | ((picture & 0xFF00) << 2) | ((picture & 0xFF0000) << 4)


@triton.jit
def blended(picture, dull, factor):
    """trunc(dull + factor * (picture - dull)) in float32."""
    out = tl.zeros_like(picture)
    for channel in tl.static_range(3):
        base = channel_of(dull, channel)
        change = (channel_of(picture, channel) - base).to(tl.float32) * factor
        out |= (change + base.to(tl.float32)).to(tl.int32) << (8 * channel)
    return out


@triton.jit
def inverted_and_masked(picture, mask, threshold):
    """Values above the threshold inverted, then the bits of the mask."""
    out = tl.zeros_like(picture)
    for channel in tl.static_range(3):
        values = channel_of(picture, channel)
        out |= (tl.where(values > threshold, 255 - values, values) & mask) << (8 * channel)
    return out


@triton.jit
def moved(picture, constants_ptr, x, y, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Pillow's nearest neighbour in 16.16 fixed point; black where the source lies outside."""
    x_in = tl.load(constants_ptr)
    x_in += x * tl.load(constants_ptr + 1) + y * tl.load(constants_ptr + 2)
    y_in = tl.load(constants_ptr + 3)
    y_in += x * tl.load(constants_ptr + 4) + y * tl.load(constants_ptr + 5)
    x_in, y_in = x_in >> 16, y_in >> 16
    found = (x_in >= 0) & (x_in < WIDTH) & (y_in >= 0) & (y_in < HEIGHT)
    source = tl.where(found, y_in * WIDTH + x_in, 0)
    return tl.where(found, tl.gather(picture, source, 0), 0)


# Nothing of a call compiles another kernel.
@triton.jit(
    do_not_specialize=["images_ptr", "plan_ptr", "constants_ptr", "out_ptr", "max_shift"]
    + [f"{kind}_{channel}" for kind in ("shift", "scale") for channel in range(3)]
)
def augment_kernel(
    images_ptr,  # [n, H, W, 3] uint8
    plan_ptr,  # [v, 14] int32
    constants_ptr,  # [14, 10, 2, 6] int32
    out_ptr,  # [v, H, W, 3] float, 16-byte aligned
    max_shift: tl.int32,
    shift_0: tl.float32,
    shift_1: tl.float32,
    shift_2: tl.float32,
    scale_0: tl.float32,
    scale_1: tl.float32,
    scale_2: tl.float32,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    P: tl.constexpr,
):
    COUNT: tl.constexpr = HEIGHT * WIDTH
    # Bytes; of every view's start, as the output is.
    ALIGNED: tl.constexpr = 16 if COUNT % 16 == 0 else 1
    # Values written at a time; more would need more registers than all before.
    PART: tl.constexpr = min(P, 2048)
    view = tl.program_id(0).to(tl.int64)
    plan_ptr += view * _COLUMNS
    pixel = tl.arange(0, P)
    x, y = pixel % WIDTH, pixel // WIDTH
    inside = pixel < COUNT

    image = tl.load(plan_ptr).to(tl.int64)
    from_y = reflected(y + tl.load(plan_ptr + 2) - max_shift, HEIGHT)
    from_x = reflected(x + tl.load(plan_ptr + 3) - max_shift, WIDTH)
    from_x = tl.where(tl.load(plan_ptr + 1) != 0, WIDTH - 1 - from_x, from_x)
    source = images_ptr + image * (COUNT * 3) + (from_y * WIDTH + from_x) * 3
    picture = tl.load(source, mask=inside, other=0).to(tl.int32)
    picture |= tl.load(source + 1, mask=inside, other=0).to(tl.int32) << 8
    picture |= tl.load(source + 2, mask=inside, other=0).to(tl.int32) << 16

    for _ in range(_OPERATIONS):
        plan_ptr += 3
        operation = tl.load(plan_ptr + 1)
        level = tl.load(plan_ptr + 2)
        row = (operation * _LEVELS + level) * 2 + tl.load(plan_ptr + 3)
        own_ptr = constants_ptr + row * _CONSTANTS
        if operation >= _FIRST_GEOMETRIC:
            picture = moved(picture, own_ptr, x, y, HEIGHT, WIDTH)
        elif (operation == _POSTERIZE) | (operation == _SOLARIZE):
            mask, threshold = tl.load(own_ptr), tl.load(own_ptr + 1)
            picture = inverted_and_masked(picture, mask, threshold)
        elif operation == _AUTO_CONTRAST:
            out = tl.zeros_like(picture)
            for channel in range(3):
                values = channel_of(picture, channel)
                table = auto_contrast_table(values, inside)
                out |= tl.gather(table, values, 0) << (8 * channel)
            picture = out
        elif operation == _EQUALIZE:
            out = tl.zeros_like(picture)
            for channel in range(3):
                values = channel_of(picture, channel)
                table = equalize_table(values, inside, COUNT)
                out |= tl.gather(table, values, 0) << (8 * channel)
            picture = out
        elif operation != 0:  # brightness is a blend with black
            dull = tl.zeros_like(picture)
            if operation == _CONTRAST:
                total = tl.sum(tl.where(inside, grey_of(picture), 0), 0)
                dull += (2 * total + COUNT) // (2 * COUNT) * _ALL_CHANNELS
            elif operation == _COLOR:
                dull = grey_of(picture) * _ALL_CHANNELS
            elif operation == _SHARPNESS:
                dull = smoothed(picture, pixel, x, y, HEIGHT, WIDTH, P)
            factor = tl.load(own_ptr).to(tl.float32, bitcast=True)
            picture = blended(picture, dull, factor)

    left, top = tl.load(plan_ptr + 4), tl.load(plan_ptr + 5)
    right, bottom = tl.load(plan_ptr + 6), tl.load(plan_ptr + 7)
    cut = (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
    picture = tl.where(cut, _CUTOUT, picture)

    # By output value instead of by pixel: neighbours in memory are neighbours in a thread.
    out_ptr += view * (COUNT * 3)
    for start in range(0, COUNT * 3, PART):
        place = start + tl.arange(0, PART)
        channel = place % 3
        value = channel_of(tl.gather(picture, place // 3, 0), channel).to(tl.float32)
        shift = tl.where(channel == 0, shift_0, tl.where(channel == 1, shift_1, shift_2))
        scale = tl.where(channel == 0, scale_0, tl.where(channel == 1, scale_1, scale_2))
        value = ((value - shift) * scale).to(out_ptr.dtype.element_ty)
        tl.store(tl.multiple_of(out_ptr + place, ALIGNED), value, mask=place < COUNT * 3)
