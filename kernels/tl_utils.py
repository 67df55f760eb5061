# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""What the kernels share: addresses, softmax in powers of two, sums over lanes and over programs.

Legend: K classes, G programs of a launch. Programs are persistent (each walks over its rows in a
fixed order), so per-class sums need [G, K] partial sums added up in the order of the programs
instead of float atomics: two runs are bit-equal.

An exponential is one multiply-add and one power of two: exp2(fma(z, log2 e, -shift)). The shift is
rounded once per row, so all terms of the row share its error, and it cancels. The multiply-add is
written out because the exponential at the maximum is computed apart and must have the same bits.
"""

import functools
from math import gcd

import torch
import triton
import triton.language as tl
from simpro_kernels.dispatch import INTERPRETED
from simpro_kernels.launch import Launcher, Plan, round_up
from torch import Tensor

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
NEG = tl.constexpr(float("-inf"))
_COMPILED = tl.constexpr(not INTERPRETED)

MAX_ALIGN = 8


def rows_of(logits: Tensor) -> Tensor:
    """The logits with adjacent columns; any row stride stays (slices, chunks, expanded rows).

    Only strided columns (a transposed matrix, columns expanded from one) are copied.
    """
    if logits.shape[1] == 1 or logits.stride(1) == 1:
        return logits
    return logits.contiguous()


def prior_of(log_prior: Tensor | None) -> Tensor | None:
    """The prior as the kernels read it: float32, contiguous."""
    return None if log_prior is None else log_prior.float().contiguous()


def alignment(*tensors: Tensor | None, spare: bool = False) -> int:
    """Elements (8, 4, 2 or 1) that divide every row's start and length, and a vector's start.

    Triton learns from an integer argument only whether 16 divides it, and from a pointer whether 16
    bytes do, which K = 1000 or a slice fails. This constant tells it what holds, and because it is
    the only alignment the kernels see, another batch size does not compile another kernel.

    Args:
        spare: of the kernel's rows too may end in elements that it reads and takes no notice of, so
            that the length of a row with such spare ones in memory (K = 127 of 128) counts as the
            next multiple.
    """
    align = MAX_ALIGN
    for tensor in tensors:
        if tensor is not None:
            align = gcd(align, tensor.data_ptr() // tensor.element_size())
            if tensor.dim() == 2:
                align = gcd(align, tensor.stride(0))
                if tensor.shape[1] % align and not (spare and _has_spare(tensor)):
                    align = gcd(align, tensor.shape[1])
    return align


def _has_spare(rows: Tensor) -> bool:
    """Whether what follows each row, up to a multiple of `MAX_ALIGN`, is before the next row and
    in the same storage."""
    width, stride = round_up(rows.shape[1], MAX_ALIGN), rows.stride(0)
    end = rows.storage_offset() + max(len(rows) - 1, 0) * stride + width
    return stride >= width and bool(end * rows.element_size() <= rows.untyped_storage().nbytes())


@triton.jit
def row_pointers(base, row, stride, cols, ALIGN: tl.constexpr):
    """[cols] of one row; rows start at multiples of ALIGN elements."""
    item_bytes: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    # int64: row * stride passes 2**31 for large logits.
    start = tl.cast(row, tl.int64) * (stride // ALIGN * ALIGN)
    return tl.multiple_of(base + start + cols, ALIGN * item_bytes)


@triton.jit
def tile_pointers(base, rows, stride, cols, ALIGN: tl.constexpr):
    """[rows, cols] likewise."""
    item_bytes: tl.constexpr = base.dtype.element_ty.primitive_bitwidth // 8
    start = tl.cast(rows, tl.int64) * (stride // ALIGN * ALIGN)
    return tl.multiple_of(base + start[:, None] + cols[None, :], [1, ALIGN * item_bytes])


@triton.jit
def load_tile(
    ptr, prior_ptr, rows, stride, cols, here,
    K: tl.constexpr, WIDTH: tl.constexpr, HAS_PRIOR: tl.constexpr, ALIGN: tl.constexpr
):  # fmt: skip
    """Logits plus prior [ROWS, BLOCK] in float32, -inf where there are none (here [ROWS])."""
    inside = here[:, None] & (cols < WIDTH)[None, :]
    values = tl.load(tile_pointers(ptr, rows, stride, cols, ALIGN), mask=inside, other=NEG)
    values = values.to(tl.float32)
    if HAS_PRIOR:
        # Pointers of the tile's shape: the load has the tile's layout, nothing is converted.
        pointers = tile_pointers(prior_ptr, rows * 0, 0, cols, ALIGN)
        values += tl.load(pointers, mask=here[:, None] & (cols < K)[None, :], other=0.0)
    return within(values, (cols < K)[None, :], K, WIDTH)


@triton.jit
def within(values, in_row, K: tl.constexpr, WIDTH: tl.constexpr, FREE: tl.constexpr = False):
    """Float32 values of a row's first WIDTH elements, with -inf for those that are no classes."""
    return values if FREE or WIDTH == K else tl.where(in_row, values, NEG)


@triton.jit
def load_row(base, row, stride, cols, mask, ALIGN: tl.constexpr, FREE: tl.constexpr = False):
    """[cols] of one row as it is in memory, -inf where the mask is not. FREE: all of it is."""
    pointers = row_pointers(base, row, stride, cols, ALIGN)
    if FREE:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=mask, other=NEG)
    return values


@triton.jit
def store_row(
    base, row, stride, cols, values, mask, ALIGN: tl.constexpr, FREE: tl.constexpr = False
):
    pointers = row_pointers(base, row, stride, cols, ALIGN)
    values = values.to(base.dtype.element_ty)
    if FREE:
        tl.store(pointers, values)
    else:
        tl.store(pointers, values, mask=mask)


@triton.jit
def load_prior(
    prior_ptr,
    cols,
    in_row,
    HAS_PRIOR: tl.constexpr,
    ALIGN: tl.constexpr,
    FREE: tl.constexpr = False,
):
    """log_prior [cols], or 0; said to be aligned as the logits are, so that both get one layout.

    It comes from the L1 cache each time: its registers are worth more.
    """
    if HAS_PRIOR:
        pointers = tl.multiple_of(prior_ptr + cols, ALIGN * 4)
        if FREE:
            prior = tl.load(pointers)
        else:
            prior = tl.load(pointers, mask=in_row, other=0.0)
    else:
        prior = 0.0
    return prior


@triton.jit
def shift_of(top):
    """The maximum as a shift of exponents; 0 for -inf (an empty row), as -inf - -inf is NaN."""
    return tl.where(top == NEG, 0.0, top * LOG2E)


@triton.jit
def exponent_of(values, shift):
    """Values as exponents of two relative to the shift."""
    return tl.fma(values, LOG2E, -shift)


@triton.jit
def of_lanes(values, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """[BLOCK] as [CHUNKS, LANES, vector]: axes 0 and 2 are in one lane, free to reduce."""
    return tl.reshape(values, [CHUNKS, LANES, values.shape[0] // CHUNKS // LANES])


@triton.jit
def lane_sum(values, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    return tl.sum(tl.sum(of_lanes(values, CHUNKS, LANES), 0), 1)


@triton.jit
def lane_max(values, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    return tl.max(tl.max(of_lanes(values, CHUNKS, LANES), 0), 1)


@triton.jit
def lane_min(values, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    return tl.min(tl.min(of_lanes(values, CHUNKS, LANES), 0), 1)


@triton.jit
def to_lanes(values, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """[LANES] to [BLOCK]: each lane's number for its own elements."""
    vector: tl.constexpr = BLOCK // CHUNKS // LANES
    spread = tl.broadcast_to(values[None, :, None], [CHUNKS, LANES, vector])
    return tl.reshape(spread, [BLOCK])


@triton.jit
def _add2(a0, b0, a1, b1):
    return a0 + a1, b0 + b1


@triton.jit
def _add3(a0, b0, c0, a1, b1, c1):
    return a0 + a1, b0 + b1, c0 + c1


@triton.jit
def sum2(a, b, axis: tl.constexpr):
    """Two sums in one reduction: their shuffles overlap."""
    if _COMPILED:  # interpreted it would take one Python call for each element
        sums = tl.reduce((a, b), axis, _add2)
    else:
        sums = tl.sum(a, axis), tl.sum(b, axis)
    return sums


@triton.jit
def sum3(a, b, c, axis: tl.constexpr):
    if _COMPILED:
        sums = tl.reduce((a, b, c), axis, _add3)
    else:
        sums = tl.sum(a, axis), tl.sum(b, axis), tl.sum(c, axis)
    return sums


@triton.jit
def without_top(sums, maxima, top, at_top):
    """Sums of the lanes without the row's maximum, and 1 for each lane that held one.

    Beside the 1 of a confident row the other classes are next to nothing; added to it they would be
    lost, and the gradient of such a row consists of them. Only the lane with the maximum still adds
    to a 1.
    """
    holds = maxima == top
    return sums - tl.where(holds, at_top, 0.0), tl.where(holds, 1.0, 0.0)


@triton.jit
def online_step(top, sums, values, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr):
    """Online softmax of the lanes: new maxima, sums with the block in, its exponents, the move.

    The move is the old shift less the new one, by which anything linear in the exponents changes.
    """
    new_top = tl.maximum(top, lane_max(values, CHUNKS, LANES))
    shift, new_shift = shift_of(top), shift_of(new_top)
    scale = tl.where(top == NEG, 0.0, tl.exp2(shift - new_shift))
    exponent = exponent_of(values, to_lanes(new_shift, BLOCK, CHUNKS, LANES))
    sums = sums * scale + lane_sum(tl.exp2(exponent), CHUNKS, LANES)
    return new_top, sums, exponent, shift - new_shift


@triton.jit
def merge_lanes(tops, sums):
    """Lanes to row: maximum, its shift and exponential, and what is still to sum."""
    top = tl.max(tops, 0)
    shift = shift_of(top)
    at_top = tl.exp2(exponent_of(top, shift))
    scale = tl.where(tops == NEG, 0.0, tl.exp2(shift_of(tops) - shift))
    rest, ones = without_top(sums * scale, tops, top, at_top)
    return top, shift, at_top, rest, ones


@triton.jit
def agreed(condition):
    """The same truth value, known to ptxas to be that of all lanes.

    Around a branch on a value that may differ between lanes it duplicates every shuffle.
    """
    if _COMPILED:  # the interpreter runs no inline assembly
        flag = tl.inline_asm_elementwise(
            "{ .reg .pred p, q; setp.ne.s32 p, $1, 0; vote.sync.any.pred q, p, 0xffffffff;"
            " selp.s32 $0, 1, 0, q; }",
            "=r,r",
            [condition.to(tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        condition = flag != 0
    return condition


@triton.jit
def last_to_arrive(counter_ptr, programs):
    """Whether all other programs have stored their partial results; then resets the counter."""
    tl.debug_barrier()  # every lane has stored before the program counts
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    tl.debug_barrier()
    if last:
        tl.store(counter_ptr, 0)
    return last


_REDUCE_ROWS = tl.constexpr(256)
_REDUCE_COLS = tl.constexpr(32)


@triton.jit(do_not_specialize=["partial_ptr", "mass_ptr", "loss_ptr", "G", "K", "W"])
def reduce_partials_kernel(
    partial_ptr,  # [G, W], then [G]
    mass_ptr,  # [K]
    loss_ptr,  # []
    G: tl.int32,
    K: tl.int32,
    W: tl.int32,
):
    """Sum the partial results of all programs in a fixed order."""
    cols = tl.program_id(0) * _REDUCE_COLS + tl.arange(0, _REDUCE_COLS)
    mass = tl.zeros([_REDUCE_COLS], dtype=tl.float32)
    loss = 0.0
    for start in range(0, G, _REDUCE_ROWS):
        rows = start + tl.arange(0, _REDUCE_ROWS)
        in_rows = rows < G
        offsets = rows[:, None].to(tl.int64) * W + cols[None, :]
        in_tile = in_rows[:, None] & (cols < K)[None, :]
        mass += tl.sum(tl.load(partial_ptr + offsets, mask=in_tile, other=0.0), 0)
        losses = partial_ptr + tl.cast(G, tl.int64) * W + rows
        loss += tl.sum(tl.load(losses, mask=in_rows, other=0.0), 0)
    tl.store(mass_ptr + cols, mass, mask=cols < K)
    if tl.program_id(0) == 0:
        tl.store(loss_ptr, loss)


@functools.cache
def reduce_launcher(device: torch.device) -> Launcher:
    return Launcher(reduce_partials_kernel, {}, Plan(warps=8), device)


def reduce_partials(partial: Tensor, programs: int, width: int, mass: Tensor, loss: Tensor) -> None:
    """partial [G, width] followed by [G], summed over G programs into mass [K] and loss []."""
    num_classes = mass.shape[0]
    grid = triton.cdiv(num_classes, _REDUCE_COLS.value)
    reduce_launcher(mass.device)(grid, partial, mass, loss, programs, num_classes, width)
