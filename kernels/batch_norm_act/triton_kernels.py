# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""Batch norm, residual addition and leaky ReLU over x as a matrix of M = N*H*W rows, C channels.

A program owns some rows of a block of channels. Where programs make partial results, the one that
arrives last merges them in the order of the programs: no float atomics, two runs are bit-equal.
The second pass of forward and of backward walks backwards: what the first read last is still in L2.

Legend: G programs or ranks; a row of statistics [2 C + 1] is mean, biased variance, rows.
"""

import triton
import triton.language as tl
from simpro_kernels.tl_utils import last_to_arrive, tile_pointers

_POINTERS = [
    "x_ptr", "y_ptr", "residual_ptr", "grad_ptr", "grad_x_ptr", "grad_residual_ptr", "saved_ptr",
    "weight_ptr", "bias_ptr", "running_mean_ptr", "running_var_ptr", "partial_ptr", "total_ptr",
    "counter_ptr",
]  # fmt: skip
# Elements of the partial results at a time: the program that arrives last works alone, and waits
# for memory once for each of them.
_MERGED = tl.constexpr(2048)


@triton.jit
def load_rows(
    ptr, tile, cols, M, C: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, FREE: tl.constexpr
):
    """[ROWS, BLOCK] in float32, 0 outside. FREE: there is nothing outside."""
    rows = tile * ROWS + tl.arange(0, ROWS)
    pointers = tile_pointers(ptr, rows, C, cols, ALIGN)
    if FREE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=(rows < M)[:, None] & (cols < C)[None, :], other=0.0)
    return values.to(tl.float32)


@triton.jit
def store_rows(
    ptr, values, tile, cols, M,
    C: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    rows = tile * ROWS + tl.arange(0, ROWS)
    pointers = tile_pointers(ptr, rows, C, cols, ALIGN)
    values = values.to(ptr.dtype.element_ty)
    if FREE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=(rows < M)[:, None] & (cols < C)[None, :])


@triton.jit
def fold(values, ROWS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr):
    """[ROWS, BLOCK] to [PART, BLOCK]: adds up the rows that one thread holds."""
    return tl.sum(tl.reshape(values, [ROWS // PART, PART, BLOCK]), 0)


@triton.jit
def per_channel(ptr, cols, C: tl.constexpr):
    return tl.load(ptr + cols, mask=cols < C, other=0.0).to(tl.float32)


@triton.jit
def norm_of(saved_ptr, weight_ptr, bias_ptr, cols, eps, C: tl.constexpr):
    """Mean, 1 / sqrt(variance + eps), weight times that, and bias [1, BLOCK]."""
    invstd = tl.rsqrt(per_channel(saved_ptr + C, cols, C) + eps)
    scale = invstd * per_channel(weight_ptr, cols, C)
    mean, bias = per_channel(saved_ptr, cols, C), per_channel(bias_ptr, cols, C)
    return mean[None, :], invstd[None, :], scale[None, :], bias[None, :]


@triton.jit
def merge(
    partial_ptr, saved_ptr, running_mean_ptr, running_var_ptr, G, cols, momentum,
    C: tl.constexpr, RUNNING: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Statistics [G, 2 C + 1] to [2 C + 1] (Chan et al., 1979), and the running ones moved.

    STEP of them side by side, which meet after the loop, so that threads wait for none in it.
    """
    STEP: tl.constexpr = _MERGED // BLOCK
    counts = tl.zeros([STEP, 1], dtype=tl.float32)
    means = tl.zeros([STEP, BLOCK], dtype=tl.float32)
    deviations = tl.zeros([STEP, BLOCK], dtype=tl.float32)
    for start in range(0, G, STEP):
        of = start + tl.arange(0, STEP)
        row = partial_ptr + of[:, None] * (2 * C + 1)
        here = (of < G)[:, None] & (cols < C)[None, :]
        # Past the L1 cache, which may hold what was there before.
        n = tl.load(row + 2 * C, mask=(of < G)[:, None], other=0.0, cache_modifier=".cg")
        mean = tl.load(row + cols[None, :], mask=here, other=0.0, cache_modifier=".cg")
        variance = tl.load(row + C + cols[None, :], mask=here, other=0.0, cache_modifier=".cg")
        apart = mean - means
        before = counts
        counts += n
        share = n / tl.maximum(counts, 1.0)
        means += apart * share
        deviations += n * variance + apart * apart * (before * share)
    count = tl.sum(tl.sum(counts, 1), 0)
    total = tl.sum(counts * means, 0) / count
    apart = means - total[None, :]
    squares = tl.sum(deviations + counts * apart * apart, 0)
    tl.store(saved_ptr + cols, total, mask=cols < C)
    tl.store(saved_ptr + C + cols, squares / count, mask=cols < C)
    tl.store(saved_ptr + 2 * C, count)
    if RUNNING:
        mean, variance = (
            per_channel(running_mean_ptr, cols, C),
            per_channel(running_var_ptr, cols, C),
        )
        unbiased = squares / tl.maximum(count - 1.0, 1.0)
        tl.store(running_mean_ptr + cols, mean + momentum * (total - mean), mask=cols < C)
        tl.store(running_var_ptr + cols, variance + momentum * (unbiased - variance), mask=cols < C)


@triton.jit
def add_rows(
    x_ptr, tile, cols, shift, s1, s2, M,
    C: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr,
    BLOCK: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    d = load_rows(x_ptr, tile, cols, M, C, ALIGN, ROWS, FREE) - shift
    if not FREE:
        rows = tile * ROWS + tl.arange(0, ROWS)
        d = tl.where((rows < M)[:, None], d, 0.0)
    return s1 + fold(d, ROWS, PART, BLOCK), s2 + fold(d * d, ROWS, PART, BLOCK)


@triton.jit(do_not_specialize=[*_POINTERS, "M", "tiles_each", "momentum"])
def statistics_kernel(
    x_ptr,  # [M, C]
    partial_ptr,  # [G, 2 C + 1]
    saved_ptr,  # [2 C + 1]
    running_mean_ptr,  # [C]
    running_var_ptr,  # [C]
    counter_ptr,  # [blocks of channels]
    M: tl.int32,
    tiles_each: tl.int32,
    momentum: tl.float32,
    C: tl.constexpr,
    RUNNING: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Sums of x less the program's first row, so that nothing cancels whatever the mean is."""
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    FULL: tl.constexpr = C % BLOCK == 0
    block, program = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    programs = tl.num_programs(0) // BLOCKS
    cols = block * BLOCK + tl.arange(0, BLOCK)
    first = program * tiles_each
    end = tl.minimum(first + tiles_each, M // ROWS)
    shift = per_channel(x_ptr + tl.cast(first, tl.int64) * ROWS * C, cols, C)
    s1 = tl.zeros([PART, BLOCK], dtype=tl.float32)
    s2 = tl.zeros([PART, BLOCK], dtype=tl.float32)
    for tile in tl.range(first, end, loop_unroll_factor=UNROLL):
        s1, s2 = add_rows(
            x_ptr, tile, cols, shift[None, :], s1, s2, M, C, ALIGN, ROWS, PART, BLOCK, FULL
        )
    n = tl.cast(tl.maximum(end - first, 0) * ROWS, tl.float32)
    if program == programs - 1 and M % ROWS != 0:
        s1, s2 = add_rows(
            x_ptr, M // ROWS, cols, shift[None, :], s1, s2, M, C, ALIGN, ROWS, PART, BLOCK, False
        )
        n += tl.cast(M % ROWS, tl.float32)
    t1, t2 = tl.sum(s1, 0) / n, tl.sum(s2, 0) / n
    row = partial_ptr + program * (2 * C + 1)
    tl.store(row + cols, shift + t1, mask=cols < C)
    tl.store(row + C + cols, tl.maximum(t2 - t1 * t1, 0.0), mask=cols < C)
    tl.store(row + 2 * C, n)
    if last_to_arrive(counter_ptr + block, programs):
        merge(
            partial_ptr, saved_ptr, running_mean_ptr, running_var_ptr, programs, cols, momentum,
            C, RUNNING, BLOCK,
        )  # fmt: skip


@triton.jit(do_not_specialize=[*_POINTERS, "G", "momentum"])
def merge_kernel(
    partial_ptr,  # [G, 2 C + 1]
    saved_ptr,  # [2 C + 1]
    running_mean_ptr,  # [C]
    running_var_ptr,  # [C]
    G: tl.int32,
    momentum: tl.float32,
    C: tl.constexpr,
    RUNNING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The statistics of all ranks, gathered, as if they were programs."""
    cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    merge(
        partial_ptr,
        saved_ptr,
        running_mean_ptr,
        running_var_ptr,
        G,
        cols,
        momentum,
        C,
        RUNNING,
        BLOCK,
    )


@triton.jit
def apply_rows(
    x_ptr, residual_ptr, y_ptr, tile, cols, mean, scale, bias, slope, M,
    C: tl.constexpr, RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    z = (load_rows(x_ptr, tile, cols, M, C, ALIGN, ROWS, FREE) - mean) * scale + bias
    if RESIDUAL:
        z += load_rows(residual_ptr, tile, cols, M, C, ALIGN, ROWS, FREE)
    z = tl.where(z > 0.0, z, z * slope)
    store_rows(y_ptr, z, tile, cols, M, C, ALIGN, ROWS, FREE)


@triton.jit(do_not_specialize=[*_POINTERS, "M", "eps", "slope"])
def apply_kernel(
    x_ptr,  # [M, C]
    residual_ptr,  # [M, C]
    y_ptr,  # [M, C]
    saved_ptr,  # [2 C + 1]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    M: tl.int32,
    eps: tl.float32,
    slope: tl.float32,
    C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
):
    """PER tiles a program, the last tiles first."""
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    FULL: tl.constexpr = C % BLOCK == 0
    cols = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mean, _, scale, bias = norm_of(saved_ptr, weight_ptr, bias_ptr, cols, eps, C)
    high = tl.cdiv(M, ROWS) - tl.program_id(0) // BLOCKS * PER
    if high * ROWS <= M and high >= PER:
        for step in tl.static_range(PER):
            apply_rows(
                x_ptr, residual_ptr, y_ptr, high - 1 - step, cols, mean, scale, bias, slope, M,
                C, RESIDUAL, ALIGN, ROWS, FULL,
            )  # fmt: skip
    else:
        for tile in range(tl.maximum(high - PER, 0), high):
            apply_rows(
                x_ptr, residual_ptr, y_ptr, tile, cols, mean, scale, bias, slope, M,
                C, RESIDUAL, ALIGN, ROWS, False,
            )  # fmt: skip


@triton.jit
def inner_gradient(
    x_ptr, y_ptr, grad_ptr, tile, cols, mean, scale, bias, slope, M,
    C: tl.constexpr, RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    """x less its mean, and the gradient behind the activation (0 in rows that do not exist)."""
    centred = load_rows(x_ptr, tile, cols, M, C, ALIGN, ROWS, FREE) - mean
    if RESIDUAL:
        z = load_rows(y_ptr, tile, cols, M, C, ALIGN, ROWS, FREE)
    else:
        z = centred * scale + bias
    grad = load_rows(grad_ptr, tile, cols, M, C, ALIGN, ROWS, FREE)
    return centred, tl.where(z > 0.0, grad, grad * slope)


@triton.jit
def add_gradients(
    x_ptr, y_ptr, grad_ptr, tile, cols, mean, scale, bias, slope, s1, s2, M,
    C: tl.constexpr, RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    PART: tl.constexpr, BLOCK: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    centred, inner = inner_gradient(
        x_ptr, y_ptr, grad_ptr, tile, cols, mean, scale, bias, slope, M,
        C, RESIDUAL, ALIGN, ROWS, FREE,
    )  # fmt: skip
    return s1 + fold(inner * centred, ROWS, PART, BLOCK), s2 + fold(inner, ROWS, PART, BLOCK)


@triton.jit(do_not_specialize=[*_POINTERS, "M", "tiles_each", "eps", "slope"])
def sums_kernel(
    x_ptr,  # [M, C]
    y_ptr,  # [M, C], read with RESIDUAL only
    grad_ptr,  # [M, C]
    saved_ptr,  # [2 C + 1]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    partial_ptr,  # [G, 2, C]
    total_ptr,  # [2, C]
    counter_ptr,  # [blocks of channels]
    M: tl.int32,
    tiles_each: tl.int32,
    eps: tl.float32,
    slope: tl.float32,
    C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PART: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Gradients of weight and bias: sums of g x^ and of g, the gradient behind the activation."""
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    FULL: tl.constexpr = C % BLOCK == 0
    STEP: tl.constexpr = _MERGED // BLOCK
    block, program = tl.program_id(0) % BLOCKS, tl.program_id(0) // BLOCKS
    programs = tl.num_programs(0) // BLOCKS
    cols = block * BLOCK + tl.arange(0, BLOCK)
    mean, invstd, scale, bias = norm_of(saved_ptr, weight_ptr, bias_ptr, cols, eps, C)
    s1 = tl.zeros([PART, BLOCK], dtype=tl.float32)
    s2 = tl.zeros([PART, BLOCK], dtype=tl.float32)
    first = program * tiles_each
    end = tl.minimum(first + tiles_each, M // ROWS)
    for tile in tl.range(first, end, loop_unroll_factor=UNROLL):
        s1, s2 = add_gradients(
            x_ptr, y_ptr, grad_ptr, tile, cols, mean, scale, bias, slope, s1, s2, M,
            C, RESIDUAL, ALIGN, ROWS, PART, BLOCK, FULL,
        )  # fmt: skip
    if program == programs - 1 and M % ROWS != 0:
        s1, s2 = add_gradients(
            x_ptr, y_ptr, grad_ptr, M // ROWS, cols, mean, scale, bias, slope, s1, s2, M,
            C, RESIDUAL, ALIGN, ROWS, PART, BLOCK, False,
        )  # fmt: skip
    row = partial_ptr + program * 2 * C + cols
    tl.store(row, tl.sum(s1, 0), mask=cols < C)
    tl.store(row + C, tl.sum(s2, 0), mask=cols < C)
    if last_to_arrive(counter_ptr + block, programs):
        t1 = tl.zeros([STEP, BLOCK], dtype=tl.float32)
        t2 = tl.zeros([STEP, BLOCK], dtype=tl.float32)
        for start in range(0, programs, STEP):
            of = start + tl.arange(0, STEP)
            here = (of < programs)[:, None] & (cols < C)[None, :]
            part = partial_ptr + of[:, None] * 2 * C + cols[None, :]
            t1 += tl.load(part, mask=here, other=0.0, cache_modifier=".cg")
            t2 += tl.load(part + C, mask=here, other=0.0, cache_modifier=".cg")
        inverse = tl.reshape(invstd, [BLOCK])
        tl.store(total_ptr + cols, tl.sum(t1, 0) * inverse, mask=cols < C)
        tl.store(total_ptr + C + cols, tl.sum(t2, 0), mask=cols < C)


@triton.jit
def gradient_rows(
    x_ptr, y_ptr, grad_ptr, grad_x_ptr, grad_residual_ptr, tile, cols, mean, scale, bias, a, c,
    slope, M, C: tl.constexpr, RESIDUAL: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    centred, inner = inner_gradient(
        x_ptr, y_ptr, grad_ptr, tile, cols, mean, scale, bias, slope, M,
        C, RESIDUAL, ALIGN, ROWS, FREE,
    )  # fmt: skip
    if RESIDUAL:
        store_rows(grad_residual_ptr, inner, tile, cols, M, C, ALIGN, ROWS, FREE)
    store_rows(grad_x_ptr, scale * inner - (a * centred + c), tile, cols, M, C, ALIGN, ROWS, FREE)


@triton.jit(do_not_specialize=[*_POINTERS, "M", "eps", "slope"])
def gradient_kernel(
    x_ptr,  # [M, C]
    y_ptr,  # [M, C], read with RESIDUAL only
    grad_ptr,  # [M, C]
    grad_x_ptr,  # [M, C]
    grad_residual_ptr,  # [M, C]
    saved_ptr,  # [2 C + 1]
    weight_ptr,  # [C]
    bias_ptr,  # [C]
    total_ptr,  # [2, C]
    M: tl.int32,
    eps: tl.float32,
    slope: tl.float32,
    C: tl.constexpr,
    RESIDUAL: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    PER: tl.constexpr,
):
    """scale (g - average(g) - x^ average(g x^)), the last tiles first."""
    BLOCKS: tl.constexpr = (C + BLOCK - 1) // BLOCK
    FULL: tl.constexpr = C % BLOCK == 0
    cols = tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK)
    mean, invstd, scale, bias = norm_of(saved_ptr, weight_ptr, bias_ptr, cols, eps, C)
    count = tl.load(saved_ptr + 2 * C)
    a = scale * invstd * (per_channel(total_ptr, cols, C) / count)[None, :]
    c = scale * (per_channel(total_ptr + C, cols, C) / count)[None, :]
    high = tl.cdiv(M, ROWS) - tl.program_id(0) // BLOCKS * PER
    if high * ROWS <= M and high >= PER:
        for step in tl.static_range(PER):
            gradient_rows(
                x_ptr, y_ptr, grad_ptr, grad_x_ptr, grad_residual_ptr, high - 1 - step, cols, mean,
                scale, bias, a, c, slope, M, C, RESIDUAL, ALIGN, ROWS, FULL,
            )  # fmt: skip
    else:
        for tile in range(tl.maximum(high - PER, 0), high):
            gradient_rows(
                x_ptr, y_ptr, grad_ptr, grad_x_ptr, grad_residual_ptr, tile, cols, mean,
                scale, bias, a, c, slope, M, C, RESIDUAL, ALIGN, ROWS, False,
            )  # fmt: skip
