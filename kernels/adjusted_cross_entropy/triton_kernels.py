# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""One pass over the logits: cross-entropy with a log-prior, and its gradient.

Legend: B images, L views, K classes, R = L*B rows, G programs; the mathematics is in README.md.
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

# Run-time arguments: another batch or slice never compiles another kernel.
_RUNTIME = ["logits_ptr", "targets_ptr", "R", "B", "K", "stride", "ignore_index"]
_COUNT_BLOCK = tl.constexpr(1024)


@triton.jit(do_not_specialize=["targets_ptr", "B", "num_views", "ignore_index"])
def mean_weight_kernel(targets_ptr, weight_ptr, B, num_views, ignore_index):
    """1 / (number of rows that are not ignored), 0 if all are: the weight of a row in the mean."""
    count = tl.zeros([_COUNT_BLOCK], dtype=tl.int32)
    for start in range(0, B, _COUNT_BLOCK):
        images = start + tl.arange(0, _COUNT_BLOCK)
        target = tl.load(targets_ptr + images, mask=images < B, other=0)
        count += ((target != ignore_index) & (images < B)).to(tl.int32)
    # Float: L * B may pass 2**31.
    rows = tl.sum(count, 0).to(tl.float32) * num_views
    tl.store(weight_ptr, tl.where(rows > 0, tl.div_rn(1.0, tl.maximum(rows, 1.0)), 0.0))


@triton.jit
def load_targets(targets_ptr, rows, in_batch, R, B, K, ignore_index):
    """Target class of each row, which rows count, and which name no class."""
    target = tl.load(targets_ptr + rows % B, mask=in_batch, other=0)
    used = in_batch & (target != ignore_index)
    out_of_range = used & ((target < 0) | (target >= K))
    return target, used, out_of_range


@triton.jit(do_not_specialize=_RUNTIME)
def one_block_kernel(
    logits_ptr,  # [R, K]
    targets_ptr,  # [B]
    prior_ptr,  # [K]
    weight_ptr,  # []
    row_loss_ptr,  # [R]
    grad_ptr,  # [R, K] contiguous
    partial_loss_ptr,  # [G]
    R,
    B,
    K,
    stride,
    ignore_index,
    HAS_PRIOR: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is one block and is read once."""
    K = K // ALIGN * ALIGN
    cols = tl.arange(0, BLOCK)
    in_row = cols < K
    prior = load_prior(prior_ptr, cols, in_row, HAS_PRIOR)
    weight = tl.load(weight_ptr)
    loss_sum = tl.zeros([ROWS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        rows = row_offsets(tile, ROWS)
        in_batch = rows < R
        target, used, out_of_range = load_targets(
            targets_ptr, rows, in_batch, R, B, K, ignore_index
        )
        pointers = aligned_pointers(logits_ptr, rows, stride, cols, ALIGN)
        # Ignored rows are not read.
        logits = tl.load(pointers, mask=used[:, None] & in_row[None, :], other=float("-inf"))
        logits = logits.to(tl.float32) + prior[None, :]
        shift = finite_or_zero_shift(tl.max(logits, 1))
        exp, ones, rest = exp_and_sums(logits, shift)
        normaliser = ones + rest
        shifted = logits - shift[:, None]
        at_target = cols[None, :] == target[:, None]
        loss = tl.log(normaliser) - tl.sum(tl.where(at_target, shifted, 0.0), 1)
        loss = tl.where(used, loss, 0.0)
        loss = tl.where(out_of_range, float("nan"), loss)
        tl.store(row_loss_ptr + rows, loss, mask=in_batch)
        loss_sum += loss
        if WITH_GRAD:
            grad = exp / normaliser[:, None] - tl.where(at_target, 1.0, 0.0)
            if SCALE_GRAD:
                grad *= weight
            grad = tl.where(used[:, None], grad, 0.0)
            grad = tl.where(out_of_range[:, None], float("nan"), grad)
            grad_ptrs = aligned_pointers(grad_ptr, rows, K, cols, ALIGN)
            in_tile = in_batch[:, None] & in_row[None, :]
            tl.store(grad_ptrs, grad.to(grad_ptr.dtype.element_ty), mask=in_tile)
    tl.store(partial_loss_ptr + tl.program_id(0), tl.sum(loss_sum, 0) * weight)


@triton.jit(do_not_specialize=_RUNTIME)
def column_blocks_kernel(
    logits_ptr,  # [R, K]
    targets_ptr,  # [B]
    prior_ptr,  # [K]
    weight_ptr,  # []
    row_loss_ptr,  # [R]
    grad_ptr,  # [R, K] contiguous
    partial_loss_ptr,  # [G]
    R,
    B,
    K,
    stride,
    ignore_index,
    HAS_PRIOR: tl.constexpr,
    SCALE_GRAD: tl.constexpr,
    WITH_GRAD: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A row is many blocks: online softmax, then the gradient from a second read in the L2."""
    K = K // ALIGN * ALIGN
    weight = tl.load(weight_ptr)
    loss_sum = tl.zeros([ROWS], dtype=tl.float32)
    for tile in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        rows = row_offsets(tile, ROWS)
        in_batch = rows < R
        target, used, out_of_range = load_targets(
            targets_ptr, rows, in_batch, R, B, K, ignore_index
        )
        top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
        ones = tl.zeros([ROWS], dtype=tl.float32)
        rest = tl.zeros([ROWS], dtype=tl.float32)
        at_target_logit = tl.zeros([ROWS], dtype=tl.float32)
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            in_row = cols < K
            pointers = aligned_pointers(logits_ptr, rows, stride, cols, ALIGN)
            logits = tl.load(pointers, mask=used[:, None] & in_row[None, :], other=float("-inf"))
            logits = logits.to(tl.float32)
            logits += load_prior(prior_ptr, cols, in_row, HAS_PRIOR)[None, :]
            at_target = cols[None, :] == target[:, None]
            at_target_logit += tl.sum(tl.where(at_target, logits, 0.0), 1)
            top, ones, rest = online_softmax_step(top, ones, rest, logits)
        normaliser = ones + rest
        shift = finite_or_zero_shift(top)
        loss = tl.where(used, tl.log(normaliser) - (at_target_logit - shift), 0.0)
        loss = tl.where(out_of_range, float("nan"), loss)
        tl.store(row_loss_ptr + rows, loss, mask=in_batch)
        loss_sum += loss
        if WITH_GRAD:
            for start in range(0, K, BLOCK):
                cols = start + tl.arange(0, BLOCK)
                in_row = cols < K
                pointers = aligned_pointers(logits_ptr, rows, stride, cols, ALIGN)
                in_used = used[:, None] & in_row[None, :]
                logits = tl.load(pointers, mask=in_used, other=float("-inf")).to(tl.float32)
                logits += load_prior(prior_ptr, cols, in_row, HAS_PRIOR)[None, :]
                softmax = tl.exp(logits - shift[:, None]) / normaliser[:, None]
                grad = softmax - tl.where(cols[None, :] == target[:, None], 1.0, 0.0)
                if SCALE_GRAD:
                    grad *= weight
                grad = tl.where(used[:, None], grad, 0.0)
                grad = tl.where(out_of_range[:, None], float("nan"), grad)
                grad_ptrs = aligned_pointers(grad_ptr, rows, K, cols, ALIGN)
                in_tile = in_batch[:, None] & in_row[None, :]
                tl.store(grad_ptrs, grad.to(grad_ptr.dtype.element_ty), mask=in_tile)
    tl.store(partial_loss_ptr + tl.program_id(0), tl.sum(loss_sum, 0) * weight)


def launch(
    logits: Tensor,
    targets: Tensor,
    log_prior: Tensor | None,
    *,
    ignore_index: int,
    with_grad: bool,
    scale_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean loss, row losses, weight of a row in the mean, gradient ([0, K] if not wanted).

    The gradient is that of the sum of the row losses, times the weight with ``scale_grad``.
    """
    logits, targets = rows_of(logits), targets.contiguous()
    (num_rows, num_classes), num_images = logits.shape, targets.shape[0]
    tile = tile_for(num_classes)
    programs = tile.programs(num_rows, logits.device)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=logits.device)
    row_loss = empty(num_rows)
    weight = empty(())
    partial_loss = empty(programs)
    grad = logits.new_empty(num_rows if with_grad else 0, num_classes)
    kernel = column_blocks_kernel if num_classes > MAX_ONE_BLOCK else one_block_kernel
    with on_device_of(logits):
        mean_weight_kernel[(1,)](
            targets,
            weight,
            num_images,
            num_rows // max(num_images, 1),
            ignore_index,
            num_warps=4,
        )
        kernel[(programs,)](
            logits,
            targets,
            partial_loss if log_prior is None else log_prior.float().contiguous(),
            weight,
            row_loss,
            grad,
            partial_loss,
            num_rows,
            num_images,
            num_classes,
            logits.stride(0),
            ignore_index,
            HAS_PRIOR=log_prior is not None,
            SCALE_GRAD=scale_grad,
            WITH_GRAD=with_grad,
            ALIGN=alignment(logits),
            ROWS=tile.rows,
            BLOCK=tile.block,
            **tile.launch_options,
        )
        loss = reduce_partials(partial_loss.new_empty(programs, 0), partial_loss)[1]
    return loss, row_loss, weight, grad
