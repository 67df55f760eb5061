# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""One pass over the logits: cross-entropy with a log-prior, and its gradient.

Up to 128 classes a warp takes several rows at a time. Up to 2,048 a warp (two above 1,024) owns a
whole row: no barrier in the loop, the next row and the target of the one after it are requested
ahead. Beyond, blocks of columns stream by and every lane keeps its own online softmax; the gradient
reads the row again from the L2 cache.

One launch: every program counts the rows of the mean itself while the batch is small, and the one
that arrives last adds up the partial losses in the order of the programs.

Legend: B images, L views, K classes, R = L*B rows, G programs; the mathematics is in README.md.
"""

import triton
import triton.language as tl
from simpro_kernels.tl_utils import (
    LN2,
    NEG,
    agreed,
    exponent_of,
    lane_max,
    lane_sum,
    last_to_arrive,
    load_prior,
    load_row,
    load_tile,
    merge_lanes,
    online_step,
    shift_of,
    store_row,
    sum2,
    tile_pointers,
    without_top,
)

# Another batch or slice never compiles another kernel.
_RUNTIME = [
    "logits_ptr",
    "targets_ptr",
    "prior_ptr",
    "weight_ptr",
    "row_loss_ptr",
    "grad_ptr",
    "partial_ptr",
    "loss_ptr",
    "counter_ptr",
    "R",
    "B",
    "stride",
    "ignore_index",
]
MAX_COUNTED = 2048
"""Up to so many images every program counts those that are not ignored; beyond, a kernel before."""

_MAX_COUNTED = tl.constexpr(MAX_COUNTED)
_COUNT_BLOCK = tl.constexpr(512)
_LARGE_COUNT_BLOCK = tl.constexpr(8192)
_PARTIALS = tl.constexpr(512)


@triton.jit
def mean_weight(targets_ptr, R, B, ignore_index, BLOCK: tl.constexpr):
    """1 / (number of rows that are not ignored), 0 if all are: the weight of a row in the mean."""
    used = tl.zeros([BLOCK], dtype=tl.int32)
    for start in range(0, B, BLOCK):
        images = start + tl.arange(0, BLOCK)
        target = tl.load(targets_ptr + images, mask=images < B, other=0)
        used += ((target != ignore_index) & (images < B)).to(tl.int32)
    rows = tl.sum(used, 0).to(tl.float32) * (R // tl.maximum(B, 1))
    return tl.where(rows > 0, tl.div_rn(1.0, tl.maximum(rows, 1.0)), 0.0)


@triton.jit(do_not_specialize=["targets_ptr", "weight_ptr", "R", "B", "ignore_index"])
def mean_weight_kernel(targets_ptr, weight_ptr, R: tl.int32, B: tl.int32, ignore_index: tl.int64):
    weight = mean_weight(targets_ptr, R, B, ignore_index, _LARGE_COUNT_BLOCK)
    tl.store(weight_ptr, weight)


@triton.jit
def weight_of_row(targets_ptr, weight_ptr, R, B, ignore_index, MEAN: tl.constexpr):
    """Of a row in the loss; stored for backward."""
    weight = 1.0
    if MEAN:
        if B > _MAX_COUNTED:
            weight = tl.load(weight_ptr)
        else:
            weight = mean_weight(targets_ptr, R, B, ignore_index, _COUNT_BLOCK)
    if tl.program_id(0) == 0:
        tl.store(weight_ptr, weight)
    return weight


@triton.jit
def load_target(targets_ptr, row, R, B, ignore_index):
    """Target of a row (or of rows); past the end one that is ignored."""
    target = tl.load(targets_ptr + row % tl.maximum(B, 1), mask=row < R, other=0)
    return tl.where(row < R, target, ignore_index)


@triton.jit
def load_picked(
    logits_ptr, prior_ptr, row, stride, target, used, K: tl.constexpr, HAS_PRIOR: tl.constexpr
):
    """The adjusted logit of the target, NaN where it names no class, -inf for an ignored row."""
    in_range = (target >= 0) & (target < K)
    at = tl.cast(row, tl.int64) * stride + target
    picked = tl.load(logits_ptr + at, mask=used & in_range, other=NEG).to(tl.float32)
    if HAS_PRIOR:
        picked += tl.load(prior_ptr + target, mask=used & in_range, other=0.0)
    return tl.where(in_range, picked, float("nan")), in_range


@triton.jit
def finish(loss_sum, partial_ptr, loss_ptr, counter_ptr):
    """The last to arrive adds up in the order of the programs: who that is changes no sum."""
    programs = tl.num_programs(0)
    tl.store(partial_ptr + tl.program_id(0), loss_sum)
    if last_to_arrive(counter_ptr, programs):
        loss = 0.0
        for start in range(0, programs, _PARTIALS):
            of = start + tl.arange(0, _PARTIALS)
            # Past the L1 cache, which may hold what was there before.
            part = tl.load(partial_ptr + of, mask=of < programs, other=0.0, cache_modifier=".cg")
            loss += tl.sum(part, 0)
        tl.store(loss_ptr, loss)


@triton.jit(do_not_specialize=_RUNTIME)
def tile_kernel(
    logits_ptr,  # [R, K]
    targets_ptr,  # [B]
    prior_ptr,  # [K]
    weight_ptr,  # []
    row_loss_ptr,  # [R]
    grad_ptr,  # [R, K] contiguous
    partial_ptr,  # [G]
    loss_ptr,  # []
    counter_ptr,  # []
    R: tl.int32,
    B: tl.int32,
    stride: tl.int64,
    ignore_index: tl.int64,
    K: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    MEAN: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Several rows at a time; ignored rows are not read."""
    cols = tl.arange(0, BLOCK)
    in_row = (cols < K)[None, :]
    weight = weight_of_row(targets_ptr, weight_ptr, R, B, ignore_index, MEAN)
    factor = weight if SCALE_GRAD else 1.0
    loss_sum = tl.zeros([ROWS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        rows = tile * ROWS + tl.arange(0, ROWS)
        target = load_target(targets_ptr, rows, R, B, ignore_index)
        used = target != ignore_index
        here = used[:, None] & in_row
        logits = load_tile(logits_ptr, prior_ptr, rows, stride, cols, here, HAS_PRIOR, ALIGN)
        picked, in_range = load_picked(
            logits_ptr, prior_ptr, rows, stride, target, used, K, HAS_PRIOR
        )
        top = tl.max(logits, 1)
        shift = shift_of(top)
        exp = tl.exp2(exponent_of(logits, shift[:, None]))
        is_top = logits == top[:, None]
        ones, rest = sum2(tl.where(is_top, exp, 0.0), tl.where(is_top, 0.0, exp), 1)
        normaliser = ones + rest
        loss = (tl.log2(normaliser) - exponent_of(picked, shift)) * LN2
        loss = tl.where(used, loss, 0.0)
        loss_sum += loss
        if not MEAN:
            tl.store(row_loss_ptr + rows, loss, mask=rows < R)
        if WITH_GRAD:
            scale = tl.where(in_range, factor / normaliser, float("nan"))
            at_target = cols[None, :] == target[:, None]
            grad = exp * scale[:, None] - tl.where(at_target, factor, 0.0)
            grad = tl.where(used[:, None], grad, 0.0).to(grad_ptr.dtype.element_ty)
            pointers = tile_pointers(grad_ptr, rows, K, cols, ALIGN)
            tl.store(pointers, grad, mask=(rows < R)[:, None] & in_row)
    if MEAN:
        finish(tl.sum(loss_sum, 0) * weight, partial_ptr, loss_ptr, counter_ptr)


@triton.jit(do_not_specialize=_RUNTIME)
def row_kernel(
    logits_ptr,  # [R, K]
    targets_ptr,  # [B]
    prior_ptr,  # [K]
    weight_ptr,  # []
    row_loss_ptr,  # [R]
    grad_ptr,  # [R, K] contiguous
    partial_ptr,  # [G]
    loss_ptr,  # []
    counter_ptr,  # []
    R: tl.int32,
    B: tl.int32,
    stride: tl.int64,
    ignore_index: tl.int64,
    K: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    MEAN: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    """A row is one block and is read once; ignored rows are not read."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    cols = tl.arange(0, BLOCK)
    in_row = cols < K
    next_target = load_target(targets_ptr, program, R, B, ignore_index)
    in_next = in_row & (next_target != ignore_index)
    next_row = load_row(logits_ptr, program, stride, cols, in_next, ALIGN)
    after_next = load_target(targets_ptr, program + programs, R, B, ignore_index)
    weight = weight_of_row(targets_ptr, weight_ptr, R, B, ignore_index, MEAN)
    factor = weight if SCALE_GRAD else 1.0
    loss_sum = 0.0
    for row in range(program, R, programs):
        target, next_target = next_target, after_next
        used = target != ignore_index
        logits = next_row.to(tl.float32) + load_prior(prior_ptr, cols, in_row, HAS_PRIOR, ALIGN)
        in_next = in_row & (next_target != ignore_index)
        next_row = load_row(logits_ptr, row + programs, stride, cols, in_next, ALIGN)
        after_next = load_target(targets_ptr, row + 2 * programs, R, B, ignore_index)
        picked, in_range = load_picked(
            logits_ptr, prior_ptr, row, stride, target, used, K, HAS_PRIOR
        )
        maxima = lane_max(logits, CHUNKS, LANES)
        top = tl.max(maxima, 0)
        shift = shift_of(top)
        exp = tl.exp2(exponent_of(logits, shift))
        at_top = tl.exp2(exponent_of(top, shift))
        rest, ones = without_top(lane_sum(exp, CHUNKS, LANES), maxima, top, at_top)
        rest, ones = sum2(rest, ones, 0)
        normaliser = ones * at_top + rest
        loss = (tl.log2(normaliser) - exponent_of(picked, shift)) * LN2
        loss = tl.where(used, loss, 0.0)
        loss_sum += loss
        if not MEAN:
            tl.store(row_loss_ptr + row, loss)
        if WITH_GRAD:
            scale = tl.where(in_range, factor / normaliser, float("nan"))
            grad = exp * scale - tl.where(cols == target, factor, 0.0)
            grad = tl.where(used, grad, 0.0)
            store_row(grad_ptr, row, K, cols, grad, in_row, ALIGN)
    if MEAN:
        finish(loss_sum * weight, partial_ptr, loss_ptr, counter_ptr)


@triton.jit
def softmax_block(
    tops, sums, logits_ptr, prior_ptr, row, stride, start,
    K: tl.constexpr, HAS_PRIOR: tl.constexpr, ALIGN: tl.constexpr,
    BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, BLOCK)
    logits = load_row(logits_ptr, row, stride, cols, cols < K, ALIGN, FREE).to(tl.float32)
    logits += load_prior(prior_ptr, cols, cols < K, HAS_PRIOR, ALIGN, FREE)
    tops, sums, _, _ = online_step(tops, sums, logits, BLOCK, CHUNKS, LANES)
    return tops, sums


@triton.jit
def grad_block(
    logits_ptr, prior_ptr, grad_ptr, row, stride, start, shift, scale, target, factor,
    K: tl.constexpr, HAS_PRIOR: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, BLOCK)
    logits = load_row(logits_ptr, row, stride, cols, cols < K, ALIGN, FREE).to(tl.float32)
    logits += load_prior(prior_ptr, cols, cols < K, HAS_PRIOR, ALIGN, FREE)
    grad = tl.exp2(exponent_of(logits, shift)) * scale - tl.where(cols == target, factor, 0.0)
    store_row(grad_ptr, row, K, cols, grad, cols < K, ALIGN, FREE)


@triton.jit(do_not_specialize=[*_RUNTIME, "blocks"])
def wide_kernel(
    logits_ptr,  # [R, K]
    targets_ptr,  # [B]
    prior_ptr,  # [K]
    weight_ptr,  # []
    row_loss_ptr,  # [R]
    grad_ptr,  # [R, K] contiguous
    partial_ptr,  # [G]
    loss_ptr,  # []
    counter_ptr,  # []
    R: tl.int32,
    B: tl.int32,
    stride: tl.int64,
    ignore_index: tl.int64,
    blocks: tl.int32,  # K // BLOCK, not a constant: all of the loop would be unrolled
    K: tl.constexpr,
    HAS_PRIOR: tl.constexpr,
    MEAN: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """A row is many blocks; ignored rows are not read."""
    TAIL: tl.constexpr = K % BLOCK != 0
    FULL: tl.constexpr = K // BLOCK * BLOCK
    inside = blocks * BLOCK
    none = tl.zeros([LANES], dtype=tl.float32)
    weight = weight_of_row(targets_ptr, weight_ptr, R, B, ignore_index, MEAN)
    factor = weight if SCALE_GRAD else 1.0
    loss_sum = 0.0
    for row in range(tl.program_id(0), R, tl.num_programs(0)):
        target = load_target(targets_ptr, row, R, B, ignore_index)
        used = target != ignore_index
        loss = 0.0
        if agreed(used):
            picked, in_range = load_picked(
                logits_ptr, prior_ptr, row, stride, target, used, K, HAS_PRIOR
            )
            tops, sums = none + NEG, none
            for start in tl.range(0, inside, BLOCK, loop_unroll_factor=UNROLL):
                tops, sums = softmax_block(
                    tops, sums, logits_ptr, prior_ptr, row, stride, start,
                    K, HAS_PRIOR, ALIGN, BLOCK, CHUNKS, LANES, True,
                )  # fmt: skip
            if TAIL:
                tops, sums = softmax_block(
                    tops, sums, logits_ptr, prior_ptr, row, stride, FULL,
                    K, HAS_PRIOR, ALIGN, BLOCK, CHUNKS, LANES, False,
                )  # fmt: skip
            _, shift, at_top, rest, ones = merge_lanes(tops, sums)
            rest, ones = sum2(rest, ones, 0)
            normaliser = ones * at_top + rest
            loss = (tl.log2(normaliser) - exponent_of(picked, shift)) * LN2
            if WITH_GRAD:
                scale = tl.where(in_range, factor / normaliser, float("nan"))
                for start in tl.range(0, inside, BLOCK, loop_unroll_factor=UNROLL):
                    grad_block(
                        logits_ptr, prior_ptr, grad_ptr, row, stride, start, shift, scale, target,
                        factor, K, HAS_PRIOR, ALIGN, BLOCK, True,
                    )  # fmt: skip
                if TAIL:
                    grad_block(
                        logits_ptr, prior_ptr, grad_ptr, row, stride, FULL, shift, scale, target,
                        factor, K, HAS_PRIOR, ALIGN, BLOCK, False,
                    )  # fmt: skip
        elif WITH_GRAD:
            for start in tl.range(0, inside + BLOCK, BLOCK, loop_unroll_factor=1):
                cols = start + tl.arange(0, BLOCK)
                zeros = tl.zeros([BLOCK], dtype=tl.float32)
                store_row(grad_ptr, row, K, cols, zeros, cols < K, ALIGN)
        loss_sum += loss
        if not MEAN:
            tl.store(row_loss_ptr + row, loss)
    if MEAN:
        finish(loss_sum * weight, partial_ptr, loss_ptr, counter_ptr)
