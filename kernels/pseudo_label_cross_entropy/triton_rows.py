# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""128 < K <= 2,048: a warp (four above 1,024 classes) owns a whole row.

No barrier in the loop, every logit read once, many independent programs on a multiprocessor. The
weak row of the next image is requested while this one is worked on, the next view while the current
one is; strong rows are not read where the mask is 0.

Legend: N images, V strong views, K classes, G programs; the mathematics is in README.md. All
arithmetic is float32; logits and gradient are rounded at the load and at the store only.
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
    load_prior,
    load_row,
    shift_of,
    store_row,
    sum2,
    sum3,
    within,
    without_top,
)

# Another batch, threshold, scale or slice never compiles another kernel.
RUNTIME = [
    "weak_ptr",
    "strong_ptr",
    "prior_weak_ptr",
    "prior_strong_ptr",
    "row_loss_ptr",
    "grad_ptr",
    "mask_ptr",
    "max_prob_ptr",
    "partial_ptr",
    "threshold_ptr",
    "N",
    "V",
    "stride_weak",
    "stride_strong",
    "stride_grad",
]


@triton.jit
def max_prob_of(top, at_top, normaliser):
    """Largest probability (NaN in an invalid row), and whether the row is valid.

    A row with NaN, +inf or nothing but -inf is not.
    """
    valid = (top > NEG) & (top < float("inf")) & (normaliser == normaliser)
    # Rounded division: 1 / 2 is at a threshold of 0.5.
    max_prob = tl.div_rn(at_top, tl.where(valid, normaliser, 1.0))
    return tl.where(valid, max_prob, float("nan")), valid


@triton.jit(do_not_specialize=RUNTIME)
def row_kernel(
    weak_ptr,  # [N, K]
    strong_ptr,  # [V*N, K]
    prior_weak_ptr,  # [K]
    prior_strong_ptr,  # [K]
    row_loss_ptr,  # [V*N]
    grad_ptr,  # [V*N, K]
    mask_ptr,  # [N]
    max_prob_ptr,  # [N]
    partial_ptr,  # [G, WIDTH] class mass, then [G] loss
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
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
    PREFETCH: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    threshold = tl.load(threshold_ptr)
    cols = tl.arange(0, BLOCK)
    in_row, in_memory = cols < K, cols < WIDTH
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    loss_sum = 0.0
    if PREFETCH:
        next_row = load_row(weak_ptr, program, stride_weak, cols, in_memory & (program < N), ALIGN)
    for image in range(program, N, programs):
        if PREFETCH:
            row = next_row
            following = image + programs
            next_row = load_row(
                weak_ptr, following, stride_weak, cols, in_memory & (following < N), ALIGN
            )
        else:
            row = load_row(weak_ptr, image, stride_weak, cols, in_memory, ALIGN)
        weak = row.to(tl.float32) + load_prior(prior_weak_ptr, cols, in_row, HAS_PRIOR_WEAK, ALIGN)
        weak = within(weak, in_row, K, WIDTH)
        maxima = lane_max(weak, CHUNKS, LANES)
        top = tl.max(maxima, 0)
        shift = shift_of(top)
        at_top = tl.exp2(exponent_of(top, shift))
        exp = tl.exp2(exponent_of(weak, shift))
        rest, ones = without_top(lane_sum(exp, CHUNKS, LANES), maxima, top, at_top)
        rest, ones = sum2(rest, ones, 0)
        normaliser = ones * at_top + rest
        max_prob, valid = max_prob_of(top, at_top, normaliser)
        keep = valid & (max_prob >= threshold)
        tl.store(mask_ptr + image, keep)
        tl.store(max_prob_ptr + image, max_prob)
        if agreed(keep):
            next_view = load_row(strong_ptr, image, stride_strong, cols, in_memory, ALIGN)
            # The target times grad_scale, as the gradient wants it.
            if HARD:
                label = tl.min(tl.where(weak == top, cols, BLOCK), 0)
                mass += tl.where(cols == label, 1.0, 0.0)
                target = tl.where(cols == label, grad_scale, 0.0)
            else:
                inverse = 1.0 / normaliser
                mass += exp * inverse
                target = exp * (inverse * grad_scale)
            for view in tl.range(V, loop_unroll_factor=1):
                at = tl.cast(image, tl.int64) + view * tl.cast(N, tl.int64)
                prior = load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG, ALIGN)
                strong = within(next_view.to(tl.float32) + prior, in_row, K, WIDTH)
                # The next view is requested before this one is looked at.
                next_view = load_row(
                    strong_ptr, at + N, stride_strong, cols, in_memory & (view + 1 < V), ALIGN
                )
                maxima_strong = lane_max(strong, CHUNKS, LANES)
                top_strong = tl.max(maxima_strong, 0)
                shift_strong = shift_of(top_strong)
                at_top_strong = tl.exp2(exponent_of(top_strong, shift_strong))
                exponent_strong = exponent_of(strong, shift_strong)
                exp_strong = tl.exp2(exponent_strong)
                rest_strong, ones_strong = without_top(
                    lane_sum(exp_strong, CHUNKS, LANES), maxima_strong, top_strong, at_top_strong
                )
                gained = tl.where(in_row, target * exponent_strong, 0.0)
                gain = lane_sum(gained, CHUNKS, LANES)
                rest_strong, ones_strong, gain = sum3(rest_strong, ones_strong, gain, 0)
                normaliser_strong = ones_strong * at_top_strong + rest_strong
                # 0 * -inf: a class without target mass costs nothing. Rare, so a branch that
                # reads again.
                if agreed(gain != gain):
                    again = load_row(strong_ptr, at, stride_strong, cols, in_memory, ALIGN)
                    prior = load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG, ALIGN)
                    again = within(again.to(tl.float32) + prior, in_row, K, WIDTH)
                    again = target * exponent_of(again, shift_strong)
                    gain = tl.sum(tl.where(target == 0.0, 0.0, again), 0)
                loss = (tl.log2(normaliser_strong) - gain * (1.0 / grad_scale)) * LN2
                loss_sum += loss
                if WITH_ROWS:
                    tl.store(row_loss_ptr + at, loss)
                if WITH_GRAD:
                    grad = exp_strong * (grad_scale / normaliser_strong) - target
                    store_row(grad_ptr, at, stride_grad, cols, grad, in_memory, ALIGN)
        else:
            nothing = tl.where(valid, 0.0, float("nan"))
            loss_sum += nothing
            for view in tl.range(V, loop_unroll_factor=1):
                at = tl.cast(image, tl.int64) + view * tl.cast(N, tl.int64)
                if WITH_ROWS:
                    tl.store(row_loss_ptr + at, nothing)
                if WITH_GRAD:
                    grad = tl.zeros([BLOCK], dtype=tl.float32) + nothing
                    store_row(grad_ptr, at, stride_grad, cols, grad, in_memory, ALIGN)
    store_row(partial_ptr, program, WIDTH, cols, mass, in_memory, ALIGN)
    tl.store(partial_ptr + tl.cast(programs, tl.int64) * WIDTH + program, loss_sum * loss_scale)
