# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""One pass over the logits: pseudo-labels, masked cross-entropy, its gradient, class mass.

Legend: N images, V strong views, K classes, G programs; the mathematics is in README.md. All
arithmetic is float32; logits and gradient are rounded at the load and at the store only.
"""

import functools

import torch
import triton
import triton.language as tl
from simpro_kernels.tl_utils import (
    MAX_ONE_BLOCK,
    aligned_pointers,
    alignment,
    exp_and_sums,
    finite_or_zero_shift,
    load_prior,
    on_device_of,
    online_softmax_step,
    reduce_partials,
    row_offsets,
    rows_of,
    tile_for,
)
from torch import Tensor

# Run-time arguments: another batch, threshold, scale or slice never compiles another kernel.
_RUNTIME = [
    "weak_ptr",
    "strong_ptr",
    "N",
    "V",
    "K",
    "stride_weak",
    "stride_strong",
    "threshold",
    "loss_scale",
    "grad_scale",
]


@triton.jit
def keep_or_poison(top, normaliser, in_batch, threshold):
    """max_prob, and which rows are kept or invalid (NaN, +inf, nothing but -inf)."""
    valid = (top > float("-inf")) & (top < float("inf")) & (normaliser == normaliser)
    # The largest exponential is exp(0) = 1. Rounded division: 1 / 2 is at a threshold of 0.5.
    max_prob = tl.where(valid, tl.div_rn(1.0, tl.where(valid, normaliser, 1.0)), float("nan"))
    keep = in_batch & valid & (max_prob >= threshold)
    return max_prob, keep, in_batch & (valid == 0)


@triton.jit(do_not_specialize=_RUNTIME)
def one_block_kernel(
    weak_ptr,  # [N, K]
    strong_ptr,  # [V*N, K]
    prior_weak_ptr,  # [K]
    prior_strong_ptr,  # [K]
    row_loss_ptr,  # [V*N]
    grad_ptr,  # [V*N, K] contiguous
    mask_ptr,  # [N]
    max_prob_ptr,  # [N]
    partial_mass_ptr,  # [G, K]
    partial_loss_ptr,  # [G]
    N,
    V,
    K,
    stride_weak,
    stride_strong,
    threshold,
    loss_scale,
    grad_scale,
    HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr,
    HARD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is one block: the target stays in registers, weak and strong are read once."""
    K = K // ALIGN * ALIGN
    cols = tl.arange(0, BLOCK)
    in_row = cols < K
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    loss_sum = tl.zeros([ROWS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = row_offsets(tile, ROWS)
        in_batch = rows < N
        in_tile = in_batch[:, None] & in_row[None, :]
        weak_ptrs = aligned_pointers(weak_ptr, rows, stride_weak, cols, ALIGN)
        weak = tl.load(weak_ptrs, mask=in_tile, other=float("-inf")).to(tl.float32)
        # The priors come from the L1 cache each time: their registers are worth more.
        weak += load_prior(prior_weak_ptr, cols, in_row, HAS_PRIOR_WEAK)[None, :]
        top = tl.max(weak, 1)
        exp, ones, rest = exp_and_sums(weak, finite_or_zero_shift(top))
        normaliser = ones + rest
        max_prob, keep, poison = keep_or_poison(top, normaliser, in_batch, threshold)
        if HARD:
            at_top = weak == top[:, None]
            label = tl.min(tl.where(at_top, cols[None, :], BLOCK), 1)
            target = tl.where(cols[None, :] == label[:, None], 1.0, 0.0)
        else:
            target = exp / normaliser[:, None]
        target = tl.where(keep[:, None], target, 0.0)
        mass += tl.sum(target, 0)
        tl.store(mask_ptr + rows, keep, mask=in_batch)
        tl.store(max_prob_ptr + rows, max_prob, mask=in_batch)

        for view in range(V):
            strong_rows = rows + tl.cast(view, tl.int64) * N
            strong_ptrs = aligned_pointers(strong_ptr, strong_rows, stride_strong, cols, ALIGN)
            # Rows that fail the mask are not read.
            strong = tl.load(strong_ptrs, mask=in_tile & keep[:, None], other=float("-inf")).to(
                tl.float32
            )
            strong += load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG)[None, :]
            shift = finite_or_zero_shift(tl.max(strong, 1))
            exp_strong, ones, rest = exp_and_sums(strong, shift)
            normaliser_strong = ones + rest
            shifted = strong - shift[:, None]
            # A class without target mass costs 0, also where its logit is -inf.
            gain = tl.sum(tl.where(target == 0.0, 0.0, target * shifted), 1)
            loss = tl.where(keep, tl.log(normaliser_strong) - gain, 0.0)
            loss = tl.where(poison, float("nan"), loss)
            tl.store(row_loss_ptr + strong_rows, loss, mask=in_batch)
            loss_sum += loss
            if WITH_GRAD:
                grad = grad_scale * (exp_strong / normaliser_strong[:, None] - target)
                grad = tl.where(keep[:, None], grad, 0.0)
                grad = tl.where(poison[:, None], float("nan"), grad)
                grad_ptrs = aligned_pointers(grad_ptr, strong_rows, K, cols, ALIGN)
                tl.store(grad_ptrs, grad.to(grad_ptr.dtype.element_ty), mask=in_tile)

    program = tl.program_id(0)
    tl.store(partial_mass_ptr + tl.cast(program, tl.int64) * K + cols, mass, mask=in_row)
    tl.store(partial_loss_ptr + program, tl.sum(loss_sum, 0) * loss_scale)


@triton.jit(do_not_specialize=_RUNTIME)
def column_blocks_kernel(
    weak_ptr,  # [N, K]
    strong_ptr,  # [V*N, K]
    prior_weak_ptr,  # [K]
    prior_strong_ptr,  # [K]
    row_loss_ptr,  # [V*N]
    grad_ptr,  # [V*N, K] contiguous
    mask_ptr,  # [N]
    max_prob_ptr,  # [N]
    partial_mass_ptr,  # [G, K]
    partial_loss_ptr,  # [G]
    N,
    V,
    K,
    stride_weak,
    stride_strong,
    threshold,
    loss_scale,
    grad_scale,
    HAS_PRIOR_WEAK: tl.constexpr,
    HAS_PRIOR_STRONG: tl.constexpr,
    HARD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is many blocks: online softmax, the later passes over a row are served by the L2."""
    K = K // ALIGN * ALIGN
    program = tl.program_id(0)
    mass_ptr = partial_mass_ptr + tl.cast(program, tl.int64) * K
    for start in range(0, K, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        tl.store(mass_ptr + cols, tl.zeros([BLOCK], dtype=tl.float32), mask=cols < K)
    loss_sum = tl.zeros([ROWS], dtype=tl.float32)
    for tile in range(program, tl.cdiv(N, ROWS), tl.num_programs(0)):
        rows = row_offsets(tile, ROWS)
        in_batch = rows < N

        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        ones = tl.zeros([ROWS], dtype=tl.float32)
        rest = tl.zeros([ROWS], dtype=tl.float32)
        label = tl.zeros([ROWS], dtype=tl.int32)
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            in_row = cols < K
            in_tile = in_batch[:, None] & in_row[None, :]
            weak_ptrs = aligned_pointers(weak_ptr, rows, stride_weak, cols, ALIGN)
            weak = tl.load(weak_ptrs, mask=in_tile, other=float("-inf")).to(tl.float32)
            weak += load_prior(prior_weak_ptr, cols, in_row, HAS_PRIOR_WEAK)[None, :]
            if HARD:
                block_top = tl.max(weak, 1)
                at_top = weak == block_top[:, None]
                block_label = tl.min(tl.where(at_top, cols[None, :], K), 1)
                # Strictly larger: the lowest index wins a tie between blocks.
                label = tl.where(block_top > top, block_label, label)
            top, ones, rest = online_softmax_step(top, ones, rest, weak)
        normaliser = ones + rest
        max_prob, keep, poison = keep_or_poison(top, normaliser, in_batch, threshold)
        tl.store(mask_ptr + rows, keep, mask=in_batch)
        tl.store(max_prob_ptr + rows, max_prob, mask=in_batch)
        shift_weak = finite_or_zero_shift(top)
        any_kept = tl.max(keep.to(tl.int32), 0) > 0

        for view in range(V):
            strong_rows = rows + tl.cast(view, tl.int64) * N
            top_strong = tl.full([ROWS], float("-inf"), dtype=tl.float32)
            ones = tl.zeros([ROWS], dtype=tl.float32)
            rest = tl.zeros([ROWS], dtype=tl.float32)
            gain = tl.zeros([ROWS], dtype=tl.float32)
            target_sum = tl.zeros([ROWS], dtype=tl.float32)
            if any_kept:
                for start in range(0, K, BLOCK):
                    cols = start + tl.arange(0, BLOCK)
                    in_row = cols < K
                    in_kept = keep[:, None] & in_row[None, :]
                    if HARD:
                        at_label = cols[None, :] == label[:, None]
                        target = tl.where(at_label & keep[:, None], 1.0, 0.0)
                    else:
                        weak_ptrs = aligned_pointers(weak_ptr, rows, stride_weak, cols, ALIGN)
                        weak = tl.load(weak_ptrs, mask=in_kept, other=float("-inf")).to(tl.float32)
                        weak += load_prior(prior_weak_ptr, cols, in_row, HAS_PRIOR_WEAK)[None, :]
                        target = tl.exp(weak - shift_weak[:, None]) / normaliser[:, None]
                        target = tl.where(in_kept, target, 0.0)
                    if view == 0:
                        mass = tl.load(mass_ptr + cols, mask=in_row, other=0.0)
                        tl.store(mass_ptr + cols, mass + tl.sum(target, 0), mask=in_row)
                    strong_ptrs = aligned_pointers(
                        strong_ptr, strong_rows, stride_strong, cols, ALIGN
                    )
                    strong = tl.load(strong_ptrs, mask=in_kept, other=float("-inf")).to(tl.float32)
                    strong += load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG)[None, :]
                    old_shift = finite_or_zero_shift(top_strong)
                    top_strong, ones, rest = online_softmax_step(top_strong, ones, rest, strong)
                    shift = finite_or_zero_shift(top_strong)
                    # gain = sum q (s - max) so far; a new maximum moves it by the mass so far. A
                    # class without target mass costs 0, also where its logit is -inf.
                    gain += target_sum * (old_shift - shift)
                    gained = tl.where(target == 0.0, 0.0, target * (strong - shift[:, None]))
                    gain += tl.sum(gained, 1)
                    target_sum += tl.sum(target, 1)
            normaliser_strong = ones + rest
            loss = tl.where(keep, tl.log(normaliser_strong) - gain, 0.0)
            loss = tl.where(poison, float("nan"), loss)
            tl.store(row_loss_ptr + strong_rows, loss, mask=in_batch)
            loss_sum += loss

            if WITH_GRAD:
                shift_strong = finite_or_zero_shift(top_strong)
                for start in range(0, K, BLOCK):
                    cols = start + tl.arange(0, BLOCK)
                    in_row = cols < K
                    in_kept = keep[:, None] & in_row[None, :]
                    if HARD:
                        at_label = cols[None, :] == label[:, None]
                        target = tl.where(at_label & keep[:, None], 1.0, 0.0)
                    else:
                        weak_ptrs = aligned_pointers(weak_ptr, rows, stride_weak, cols, ALIGN)
                        weak = tl.load(weak_ptrs, mask=in_kept, other=float("-inf")).to(tl.float32)
                        weak += load_prior(prior_weak_ptr, cols, in_row, HAS_PRIOR_WEAK)[None, :]
                        target = tl.exp(weak - shift_weak[:, None]) / normaliser[:, None]
                    strong_ptrs = aligned_pointers(
                        strong_ptr, strong_rows, stride_strong, cols, ALIGN
                    )
                    strong = tl.load(strong_ptrs, mask=in_kept, other=float("-inf")).to(tl.float32)
                    strong += load_prior(prior_strong_ptr, cols, in_row, HAS_PRIOR_STRONG)[None, :]
                    softmax = tl.exp(strong - shift_strong[:, None]) / normaliser_strong[:, None]
                    grad = tl.where(keep[:, None], grad_scale * (softmax - target), 0.0)
                    grad = tl.where(poison[:, None], float("nan"), grad)
                    grad_ptrs = aligned_pointers(grad_ptr, strong_rows, K, cols, ALIGN)
                    tl.store(
                        grad_ptrs,
                        grad.to(grad_ptr.dtype.element_ty),
                        mask=in_batch[:, None] & in_row[None, :],
                    )
        # The next tile's lanes may add to partial sums that other lanes have stored.
        tl.debug_barrier()
    tl.store(partial_loss_ptr + program, tl.sum(loss_sum, 0) * loss_scale)


def launch(
    weak: Tensor,
    strong: Tensor,
    log_prior_weak: Tensor | None,
    log_prior_strong: Tensor | None,
    threshold: float,
    *,
    hard: bool,
    with_grad: bool,
    loss_scale: float,
    grad_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """loss_scale * (sum of row losses), row losses, class mass, mask, max_prob, gradient.

    The gradient [V*N, K] is grad_scale times the gradient of the sum of the row losses, in the
    dtype of the logits ([0, K] without ``with_grad``).
    """
    weak, strong = rows_of(weak), rows_of(strong)
    (num_images, num_classes), num_rows = weak.shape, strong.shape[0]
    num_views = num_rows // num_images if num_images else 1
    tile = tile_for(num_classes)
    programs = tile.programs(num_images, weak.device)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=weak.device)
    row_loss = empty(num_rows)
    mask = torch.empty(num_images, dtype=torch.bool, device=weak.device)
    max_prob = empty(num_images)
    partial_mass = empty(programs, num_classes)
    partial_loss = empty(programs)
    grad = strong.new_empty(num_rows if with_grad else 0, num_classes)
    kernel = column_blocks_kernel if num_classes > MAX_ONE_BLOCK else one_block_kernel
    with on_device_of(weak):
        kernel[(programs,)](
            weak,
            strong,
            partial_loss if log_prior_weak is None else log_prior_weak.float().contiguous(),
            partial_loss if log_prior_strong is None else log_prior_strong.float().contiguous(),
            row_loss,
            grad,
            mask,
            max_prob,
            partial_mass,
            partial_loss,
            num_images,
            num_views,
            num_classes,
            weak.stride(0),
            strong.stride(0),
            threshold,
            loss_scale,
            grad_scale,
            HAS_PRIOR_WEAK=log_prior_weak is not None,
            HAS_PRIOR_STRONG=log_prior_strong is not None,
            HARD=hard,
            WITH_GRAD=with_grad,
            ALIGN=alignment(weak, strong),
            ROWS=tile.rows,
            BLOCK=tile.block,
            **tile.launch_options,
        )
        class_mass, loss = reduce_partials(partial_mass, partial_loss)
    return loss, row_loss, class_mass, mask, max_prob, grad
