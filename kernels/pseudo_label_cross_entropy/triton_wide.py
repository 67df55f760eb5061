# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment"
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""K > 2,048: blocks of columns stream by, every lane keeps its own online softmax.

Inside a row there is no reduction across lanes, so no barrier and no shuffle: a lane has its own
running maximum and sums, merged once per row. Pass 1 reads the weak row; pass 2 the strong rows of
all views together with the weak row, now in the L2 cache; pass 3 (gradient) reads all of them again
from there. Programs times (1 + V) rows should stay well below the cache (50 MB on an H100).

Legend: N images, V strong views, K classes, G programs; the mathematics is in README.md.
"""

import triton
import triton.language as tl
from simpro_kernels.pseudo_label_cross_entropy.triton_rows import RUNTIME, max_prob_of
from simpro_kernels.tl_utils import (
    LN2,
    NEG,
    agreed,
    exponent_of,
    lane_max,
    lane_min,
    lane_sum,
    load_prior,
    load_row,
    merge_lanes,
    online_step,
    shift_of,
    store_row,
    sum2,
    sum3,
    to_lanes,
    within,
)


@triton.jit
def load_views(
    base, image, N, stride, cols, WIDTH: tl.constexpr, V: tl.constexpr, ALIGN: tl.constexpr,
    FREE: tl.constexpr
):  # fmt: skip
    """A block of every view as it is in memory."""
    views = ()
    for view in tl.static_range(V):
        row = load_row(base, image + view * N, stride, cols, cols < WIDTH, ALIGN, FREE)
        views = views + (row,)
    return views


@triton.jit
def adjusted(
    row, prior_ptr, cols, K: tl.constexpr, WIDTH: tl.constexpr, HAS_PRIOR: tl.constexpr,
    ALIGN: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Logits as they are in memory, in float32 and with the prior; -inf beyond the row."""
    values = row.to(tl.float32) + load_prior(prior_ptr, cols, cols < K, HAS_PRIOR, ALIGN, FREE)
    return within(values, cols < K, K, WIDTH, FREE)


@triton.jit
def weak_block(
    tops, sums, labels, weak_ptr, prior_ptr, image, stride, start,
    K: tl.constexpr, WIDTH: tl.constexpr, HAS_PRIOR: tl.constexpr, HARD: tl.constexpr,
    ALIGN: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr, LANES: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    """The next block of the weak row into the lanes' maxima, sums and labels."""
    cols = start + tl.arange(0, BLOCK)
    weak = load_row(weak_ptr, image, stride, cols, cols < WIDTH, ALIGN, FREE)
    weak = adjusted(weak, prior_ptr, cols, K, WIDTH, HAS_PRIOR, ALIGN, FREE)
    if HARD:
        at_top = weak == to_lanes(lane_max(weak, CHUNKS, LANES), BLOCK, CHUNKS, LANES)
        block_labels = lane_min(tl.where(at_top, cols, K), CHUNKS, LANES)
        # Strictly larger: the lowest class wins a tie between blocks.
        labels = tl.where(lane_max(weak, CHUNKS, LANES) > tops, block_labels, labels)
    tops, sums, _, _ = online_step(tops, sums, weak, BLOCK, CHUNKS, LANES)
    return tops, sums, labels


@triton.jit
def target_block(
    weak, prior_ptr, cols, shift, factor, label,
    K: tl.constexpr, WIDTH: tl.constexpr, HAS_PRIOR: tl.constexpr, HARD: tl.constexpr,
    ALIGN: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Target times a factor; 0 beyond the row."""
    if HARD:
        target = tl.where(cols == label, factor, 0.0)
    else:
        weak = adjusted(weak, prior_ptr, cols, K, WIDTH, HAS_PRIOR, ALIGN, FREE)
        target = tl.exp2(exponent_of(weak, shift)) * factor
    return target


@triton.jit
def strong_block(
    weak, views, tops, sums, gains, masses, prior_weak_ptr, prior_strong_ptr, mass_ptr,
    start, shift, inverse, label,
    K: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr, HARD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr, LANES: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """The next block of all views into the lanes' softmax and gain; its targets into the sums."""
    cols = start + tl.arange(0, BLOCK)
    in_row, in_memory = cols < K, cols < WIDTH
    target = target_block(
        weak, prior_weak_ptr, cols, shift, inverse, label,
        K, WIDTH, HAS_PRIOR_WEAK, HARD, ALIGN, FREE,
    )  # fmt: skip
    # The alignment of the logits again: a lane adds to the sums that it stored itself.
    mass_ptrs = tl.multiple_of(mass_ptr + cols, ALIGN * 4)
    if FREE:
        tl.store(mass_ptrs, tl.load(mass_ptrs) + target)
    else:
        mass = tl.load(mass_ptrs, mask=in_memory, other=0.0) + target
        tl.store(mass_ptrs, mass, mask=in_memory)
    prior = load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG, ALIGN, FREE)
    new_tops, new_sums, new_gains = (), (), ()
    for view in tl.static_range(V):
        strong = within(views[view].to(tl.float32) + prior, in_row, K, WIDTH, FREE)
        top, total, exponent, move = online_step(
            tops[view], sums[view], strong, BLOCK, CHUNKS, LANES
        )
        gained = target * exponent
        if not FREE:
            gained = tl.where(in_row, gained, 0.0)
        # gain = sum q (z - shift) so far; another shift moves it by the target mass so far.
        gain = gains[view] + masses * move + lane_sum(gained, CHUNKS, LANES)
        new_tops, new_sums, new_gains = new_tops + (top,), new_sums + (total,), new_gains + (gain,)
    return new_tops, new_sums, new_gains, masses + lane_sum(target, CHUNKS, LANES)


@triton.jit
def careful_gain(
    weak_ptr, strong_ptr, prior_weak_ptr, prior_strong_ptr, image, at, stride_weak, stride_strong,
    shift, inverse, label, shift_strong, end,
    K: tl.constexpr, WIDTH: tl.constexpr, HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr, HARD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """sum q (z - shift) of a strong row, where a class without target mass costs 0 also at -inf."""
    gain = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, end, BLOCK, loop_unroll_factor=1):
        cols = start + tl.arange(0, BLOCK)
        weak = load_row(weak_ptr, image, stride_weak, cols, cols < WIDTH, ALIGN)
        target = target_block(
            weak, prior_weak_ptr, cols, shift, inverse, label,
            K, WIDTH, HAS_PRIOR_WEAK, HARD, ALIGN, False,
        )  # fmt: skip
        strong = load_row(strong_ptr, at, stride_strong, cols, cols < WIDTH, ALIGN)
        strong = adjusted(strong, prior_strong_ptr, cols, K, WIDTH, HAS_PRIOR_STRONG, ALIGN, False)
        gain += tl.where(target == 0.0, 0.0, target * exponent_of(strong, shift_strong))
    return tl.sum(gain, 0)


@triton.jit
def grad_block(
    weak_ptr, strong_ptr, prior_weak_ptr, prior_strong_ptr, grad_ptr, image, N, stride_weak,
    stride_strong, stride_grad, shift, factor, label, shifts, factors, start,
    K: tl.constexpr, WIDTH: tl.constexpr, V: tl.constexpr, HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr, HARD: tl.constexpr, ALIGN: tl.constexpr, BLOCK: tl.constexpr,
    FREE: tl.constexpr,
):  # fmt: skip
    cols = start + tl.arange(0, BLOCK)
    in_row, in_memory = cols < K, cols < WIDTH
    weak = 0.0 if HARD else load_row(weak_ptr, image, stride_weak, cols, in_memory, ALIGN, FREE)
    target = target_block(
        weak, prior_weak_ptr, cols, shift, factor, label,
        K, WIDTH, HAS_PRIOR_WEAK, HARD, ALIGN, FREE,
    )  # fmt: skip
    prior = load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG, ALIGN, FREE)
    for view in tl.static_range(V):
        at = image + view * N
        strong = load_row(strong_ptr, at, stride_strong, cols, in_memory, ALIGN, FREE)
        strong = within(strong.to(tl.float32) + prior, in_row, K, WIDTH, FREE)
        grad = tl.exp2(exponent_of(strong, shifts[view])) * factors[view] - target
        store_row(grad_ptr, at, stride_grad, cols, grad, in_memory, ALIGN, FREE)


@triton.jit(do_not_specialize=[*(name for name in RUNTIME if name != "V"), "blocks"])
def wide_kernel(
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
    blocks: tl.int32,  # K // BLOCK, not a constant: all of the loop would be unrolled
    stride_weak: tl.int64,
    stride_strong: tl.int64,
    stride_grad: tl.int64,
    threshold_ptr,  # float32 []
    loss_scale: tl.float32,
    grad_scale: tl.float32,
    K: tl.constexpr,
    WIDTH: tl.constexpr,
    V: tl.constexpr,
    HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr,
    HARD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    WITH_ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
    LANES: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    threshold = tl.load(threshold_ptr)
    TAIL: tl.constexpr = K % BLOCK != 0
    FULL: tl.constexpr = K // BLOCK * BLOCK
    inside = blocks * BLOCK
    end = inside + BLOCK if TAIL else inside
    mass_ptr = partial_ptr + tl.cast(program, tl.int64) * WIDTH
    for start in tl.range(0, end, BLOCK, loop_unroll_factor=1):
        cols = start + tl.arange(0, BLOCK)
        tl.store(mass_ptr + cols, tl.zeros([BLOCK], dtype=tl.float32), mask=cols < WIDTH)
    tl.debug_barrier()  # other lanes may add to them
    loss_sum = 0.0
    N = tl.cast(N, tl.int64)
    none = tl.zeros([LANES], dtype=tl.float32)
    for image in range(program, N, programs):
        tops, sums = none + NEG, none
        labels = tl.full([LANES], K, dtype=tl.int32)
        for start in tl.range(0, inside, BLOCK, loop_unroll_factor=2):
            tops, sums, labels = weak_block(
                tops, sums, labels, weak_ptr, prior_weak_ptr, image, stride_weak, start,
                K, WIDTH, HAS_PRIOR_WEAK, HARD, ALIGN, BLOCK, CHUNKS, LANES, True,
            )  # fmt: skip
        if TAIL:
            tops, sums, labels = weak_block(
                tops, sums, labels, weak_ptr, prior_weak_ptr, image, stride_weak, FULL,
                K, WIDTH, HAS_PRIOR_WEAK, HARD, ALIGN, BLOCK, CHUNKS, LANES, False,
            )  # fmt: skip
        top, shift, at_top, rest, ones = merge_lanes(tops, sums)
        rest, ones = sum2(rest, ones, 0)
        normaliser = ones * at_top + rest
        label = tl.min(tl.where(tops == top, labels, K), 0)
        max_prob, valid = max_prob_of(top, at_top, normaliser)
        keep = valid & (max_prob >= threshold)
        tl.store(mask_ptr + image, keep)
        tl.store(max_prob_ptr + image, max_prob)
        if agreed(keep):
            inverse = 1.0 if HARD else 1.0 / normaliser
            masses = none
            view_tops, view_sums, gains = (), (), ()
            for _ in tl.static_range(V):
                view_tops, view_sums = view_tops + (none + NEG,), view_sums + (none,)
                gains = gains + (none,)
            # Both are requested one block ahead (the last step asks for its own once more).
            cols = tl.arange(0, BLOCK)
            weak = 0.0 if HARD else load_row(weak_ptr, image, stride_weak, cols, None, ALIGN, True)
            views = load_views(strong_ptr, image, N, stride_strong, cols, WIDTH, V, ALIGN, True)
            for start in tl.range(0, inside, BLOCK, loop_unroll_factor=1):
                this_weak, these = weak, views
                cols = tl.minimum(start + BLOCK, inside - BLOCK) + tl.arange(0, BLOCK)
                if not HARD:
                    weak = load_row(weak_ptr, image, stride_weak, cols, None, ALIGN, True)
                views = load_views(strong_ptr, image, N, stride_strong, cols, WIDTH, V, ALIGN, True)
                view_tops, view_sums, gains, masses = strong_block(
                    this_weak, these, view_tops, view_sums, gains, masses, prior_weak_ptr,
                    prior_strong_ptr, mass_ptr, start, shift, inverse, label,
                    K, WIDTH, V, HAS_PRIOR_WEAK, HAS_PRIOR_STRONG, HARD, ALIGN, BLOCK, CHUNKS,
                    LANES, True,
                )  # fmt: skip
            if TAIL:
                cols = FULL + tl.arange(0, BLOCK)
                view_tops, view_sums, gains, masses = strong_block(
                    load_row(weak_ptr, image, stride_weak, cols, cols < WIDTH, ALIGN),
                    load_views(strong_ptr, image, N, stride_strong, cols, WIDTH, V, ALIGN, False),
                    view_tops, view_sums, gains, masses, prior_weak_ptr,
                    prior_strong_ptr, mass_ptr, FULL, shift, inverse, label,
                    K, WIDTH, V, HAS_PRIOR_WEAK, HAS_PRIOR_STRONG, HARD, ALIGN, BLOCK, CHUNKS,
                    LANES, False,
                )  # fmt: skip
            shifts, factors = (), ()
            for view in tl.static_range(V):
                at = image + view * N
                lane_shifts = shift_of(view_tops[view])
                _, shift_strong, at_top_strong, rest, ones = merge_lanes(
                    view_tops[view], view_sums[view]
                )
                gain = gains[view] + masses * (lane_shifts - shift_strong)
                rest, ones, gain = sum3(rest, ones, gain, 0)
                normaliser_strong = ones * at_top_strong + rest
                if agreed(gain != gain):  # 0 * -inf, rare
                    gain = careful_gain(
                        weak_ptr, strong_ptr, prior_weak_ptr, prior_strong_ptr, image, at,
                        stride_weak, stride_strong, shift, inverse, label, shift_strong, end,
                        K, WIDTH, HAS_PRIOR_WEAK, HAS_PRIOR_STRONG, HARD, ALIGN, BLOCK,
                    )  # fmt: skip
                loss = (tl.log2(normaliser_strong) - gain) * LN2
                loss_sum += loss
                if WITH_ROWS:
                    tl.store(row_loss_ptr + at, loss)
                shifts = shifts + (shift_strong,)
                factors = factors + (grad_scale / normaliser_strong,)
            if WITH_GRAD:
                for start in tl.range(0, inside, BLOCK, loop_unroll_factor=1):
                    grad_block(
                        weak_ptr, strong_ptr, prior_weak_ptr, prior_strong_ptr, grad_ptr, image, N,
                        stride_weak, stride_strong, stride_grad, shift, inverse * grad_scale, label,
                        shifts, factors, start,
                        K, WIDTH, V, HAS_PRIOR_WEAK, HAS_PRIOR_STRONG, HARD, ALIGN, BLOCK, True,
                    )  # fmt: skip
                if TAIL:
                    grad_block(
                        weak_ptr, strong_ptr, prior_weak_ptr, prior_strong_ptr, grad_ptr, image, N,
                        stride_weak, stride_strong, stride_grad, shift, inverse * grad_scale, label,
                        shifts, factors, FULL,
                        K, WIDTH, V, HAS_PRIOR_WEAK, HAS_PRIOR_STRONG, HARD, ALIGN, BLOCK, False,
                    )  # fmt: skip
        else:
            nothing = tl.where(valid, 0.0, float("nan"))
            loss_sum += nothing
            for view in tl.static_range(V):
                at = image + view * N
                if WITH_ROWS:
                    tl.store(row_loss_ptr + at, nothing)
                if WITH_GRAD:
                    for start in tl.range(0, end, BLOCK, loop_unroll_factor=1):
                        cols = start + tl.arange(0, BLOCK)
                        grad = tl.zeros([BLOCK], dtype=tl.float32) + nothing
                        store_row(grad_ptr, at, stride_grad, cols, grad, cols < WIDTH, ALIGN)
    tl.store(partial_ptr + tl.cast(programs, tl.int64) * WIDTH + program, loss_sum * loss_scale)
