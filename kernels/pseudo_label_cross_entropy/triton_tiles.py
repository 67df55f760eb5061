# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""K <= 128: a warp takes several rows at a time, and one launch does everything.

The rows of a tile share the latency of the shuffles. The program that arrives last adds the partial
results in the order of the programs: no second kernel.

Legend: N images, V strong views, K classes, G programs; the mathematics is in README.md.
"""

import triton
import triton.language as tl
from simpro_kernels.pseudo_label_cross_entropy.triton_rows import RUNTIME, max_prob_of
from simpro_kernels.tl_utils import (
    LN2,
    exponent_of,
    last_to_arrive,
    load_tile,
    shift_of,
    sum2,
    sum3,
    tile_pointers,
)

MAX_FINISHED = 512
"""Up to so many programs the last one adds up; beyond, a kernel of many programs is faster."""

_MAX_FINISHED = tl.constexpr(MAX_FINISHED)
_FINISH_ELEMENTS = tl.constexpr(2048)


@triton.jit
def finish(
    partial_ptr, mass_ptr, loss_ptr, counter_ptr, programs,
    K: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The last to arrive adds up in the order of the programs: who that is changes no sum."""
    if last_to_arrive(counter_ptr, programs):
        STEP: tl.constexpr = _FINISH_ELEMENTS // BLOCK
        cols = tl.arange(0, BLOCK)
        mass = tl.zeros([BLOCK], dtype=tl.float32)
        loss = 0.0
        for start in range(0, programs, STEP):
            of = start + tl.arange(0, STEP)
            here = (of < programs)[:, None] & (cols < K)[None, :]
            # Past the L1 cache, which may hold what was there before.
            part = partial_ptr + of[:, None] * WIDTH + cols[None, :]
            mass += tl.sum(tl.load(part, mask=here, other=0.0, cache_modifier=".cg"), 0)
            part = partial_ptr + programs * WIDTH + of
            loss += tl.sum(tl.load(part, mask=of < programs, other=0.0, cache_modifier=".cg"), 0)
        tl.store(mass_ptr + cols, mass, mask=cols < K)
        tl.store(loss_ptr, loss)


@triton.jit(do_not_specialize=[*RUNTIME, "mass_ptr", "loss_ptr", "counter_ptr"])
def tile_kernel(
    weak_ptr,  # [N, K]
    strong_ptr,  # [V*N, K]
    prior_weak_ptr,  # [K]
    prior_strong_ptr,  # [K]
    row_loss_ptr,  # [V*N]
    grad_ptr,  # [V*N, K]
    mask_ptr,  # [N]
    max_prob_ptr,  # [N]
    partial_ptr,  # [G, WIDTH] class mass, then [G] loss
    mass_ptr,  # [K]
    loss_ptr,  # []
    counter_ptr,  # []
    N: tl.int32,
    V: tl.int32,
    stride_weak: tl.int64,
    stride_strong: tl.int64,
    stride_grad: tl.int64,
    threshold_ptr,  # float32 []
    loss_scale: tl.float32,
    grad_scale: tl.float32,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr,
    HARD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    threshold = tl.load(threshold_ptr)
    cols = tl.arange(0, BLOCK)
    in_row, in_memory = cols < K, cols < WIDTH
    mass = tl.zeros([ROWS, BLOCK], dtype=tl.float32)
    loss_sum = tl.zeros([ROWS], dtype=tl.float32)
    for tile in range(program, tl.cdiv(N, ROWS), programs):
        rows = tile * ROWS + tl.arange(0, ROWS)
        in_batch = rows < N
        weak = load_tile(
            weak_ptr, prior_weak_ptr, rows, stride_weak, cols, in_batch,
            K, WIDTH, HAS_PRIOR_WEAK, ALIGN,
        )  # fmt: skip
        top = tl.max(weak, 1)
        shift = shift_of(top)
        exp = tl.exp2(exponent_of(weak, shift[:, None]))
        # The maximum (1 in a confident row) apart from the rest, which it would swallow.
        is_top = weak == top[:, None]
        ones, rest = sum2(tl.where(is_top, exp, 0.0), tl.where(is_top, 0.0, exp), 1)
        normaliser = ones + rest
        at_top = tl.exp2(exponent_of(top, shift))
        max_prob, valid = max_prob_of(top, at_top, normaliser)
        keep = in_batch & valid & (max_prob >= threshold)
        nothing = tl.where(in_batch & (valid == 0), float("nan"), 0.0)
        tl.store(mask_ptr + rows, keep, mask=in_batch)
        tl.store(max_prob_ptr + rows, max_prob, mask=in_batch)
        if HARD:
            label = tl.min(tl.where(is_top, cols[None, :], BLOCK), 1)
            target = tl.where(cols[None, :] == label[:, None], 1.0, 0.0)
        else:
            target = exp * (1.0 / normaliser)[:, None]
        target = tl.where(keep[:, None], target, 0.0)
        mass += target
        for view in range(V):
            at = rows + tl.cast(view, tl.int64) * N
            strong = load_tile(
                strong_ptr, prior_strong_ptr, at, stride_strong, cols, keep,
                K, WIDTH, HAS_PRIOR_STRONG, ALIGN,
            )  # fmt: skip
            top_strong = tl.max(strong, 1)
            shift_strong = shift_of(top_strong)
            exponent_strong = exponent_of(strong, shift_strong[:, None])
            exp_strong = tl.exp2(exponent_strong)
            # 0 * -inf: a class without target mass costs nothing.
            gained = tl.where(target == 0.0, 0.0, target * exponent_strong)
            is_top_strong = strong == top_strong[:, None]
            ones_strong, rest_strong, gain = sum3(
                tl.where(is_top_strong, exp_strong, 0.0),
                tl.where(is_top_strong, 0.0, exp_strong),
                gained,
                1,
            )
            normaliser_strong = ones_strong + rest_strong
            loss = tl.where(keep, (tl.log2(normaliser_strong) - gain) * LN2, nothing)
            if WITH_ROWS:
                tl.store(row_loss_ptr + at, loss, mask=in_batch)
            loss_sum += loss
            if WITH_GRAD:
                grad = exp_strong * (grad_scale / normaliser_strong)[:, None] - target * grad_scale
                grad = tl.where(keep[:, None], grad, nothing[:, None])
                pointers = tile_pointers(grad_ptr, at, stride_grad, cols, ALIGN)
                here = in_batch[:, None] & in_memory[None, :]
                tl.store(pointers, grad.to(grad_ptr.dtype.element_ty), mask=here)
    total_mass, total_loss = tl.sum(mass, 0), tl.sum(loss_sum, 0) * loss_scale
    if programs == 1:
        tl.store(mass_ptr + cols, total_mass, mask=in_row)
        tl.store(loss_ptr, total_loss)
    else:
        tl.store(partial_ptr + program * WIDTH + cols, total_mass, mask=in_row)
        tl.store(partial_ptr + programs * WIDTH + program, total_loss)
        if programs <= _MAX_FINISHED:
            finish(partial_ptr, mass_ptr, loss_ptr, counter_ptr, programs, K, WIDTH, BLOCK)
