# mypy: allow-untyped-defs, allow-incomplete-defs
# Arguments of a jitted kernel are pointers and numbers of the compiler, not Python types.
"""From the gradient that a forward kernel made to the one that autograd asks for.

A forward kernel writes the gradient of its loss into a buffer of its own. The first backward
scales that buffer in place by the incoming gradient and hands it over: no second buffer, and where
the incoming gradient is 1 (a loss that is summed and called backward on) the kernel returns without
touching memory. The factor is read on the device, so nothing synchronises. Traced code and
``create_graph=True`` get the scaled gradient from an operator without side effects.
"""

import torch
import triton
import triton.language as tl
from simpro_kernels.tl_utils import (
    aligned_pointers,
    alignment,
    on_device_of,
    row_offsets,
    tile_for,
)
from torch import Tensor


@triton.jit(do_not_specialize=["grad_ptr", "out_ptr", "factor_ptr", "R", "K"])
def scale_rows_kernel(
    grad_ptr,  # [R, K] contiguous
    out_ptr,  # [R, K] contiguous; the same memory with IN_PLACE
    factor_ptr,  # [R] or []
    R,
    K,
    PER_ROW: tl.constexpr,
    IN_PLACE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply rows by their factor; in place, a factor of 1 costs no memory traffic."""
    K = K // ALIGN * ALIGN
    if not PER_ROW and IN_PLACE:  # noqa: SIM102 (a constexpr `and` a tensor would always load)
        if tl.load(factor_ptr) == 1.0:
            return
    for tile in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        rows = row_offsets(tile, ROWS)
        moves = rows < R
        if PER_ROW:
            factor = tl.load(factor_ptr + rows, mask=moves, other=1.0)
        else:
            factor = tl.load(factor_ptr) + tl.zeros([ROWS], dtype=tl.float32)
        if IN_PLACE:
            moves = moves & (factor != 1.0)
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            in_tile = moves[:, None] & (cols < K)[None, :]
            grad_ptrs = aligned_pointers(grad_ptr, rows, K, cols, ALIGN)
            grad = tl.load(grad_ptrs, mask=in_tile, other=0.0).to(tl.float32) * factor[:, None]
            out_ptrs = aligned_pointers(out_ptr, rows, K, cols, ALIGN)
            tl.store(out_ptrs, grad.to(out_ptr.dtype.element_ty), mask=in_tile)


def _launch(grad: Tensor, out: Tensor, factor: Tensor) -> None:
    num_rows, num_classes = grad.shape
    tile = tile_for(num_classes)
    with on_device_of(grad):
        scale_rows_kernel[(tile.programs(num_rows, grad.device),)](
            grad,
            out,
            factor.contiguous(),
            num_rows,
            num_classes,
            PER_ROW=factor.dim() > 0,
            IN_PLACE=out is grad,
            ALIGN=alignment(grad, out),
            ROWS=tile.rows,
            BLOCK=tile.block,
            **tile.launch_options,
        )


@torch.library.custom_op("simpro_kernels::scale_rows", mutates_args=())
def scale_rows(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    """grad [R, K] contiguous times factor, float32 [] or [R]: in float32, rounded once.

    ``logits`` are the differentiated input, not read. They carry the graph of a second derivative
    to the error below; without them the result would be a constant, and silently wrong.
    """
    out = torch.empty_like(grad)
    _launch(grad, out, factor)
    return out


@scale_rows.register_fake
def _(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _refuse(ctx: object, grad: Tensor) -> None:
    raise RuntimeError(
        "the fused losses of simpro_kernels are differentiable once: use impl='eager' for a "
        "second derivative"
    )


scale_rows.register_autograd(_refuse)


def hand_over(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    """The gradient for autograd, from a buffer ``grad`` that nobody else uses."""
    # Tracers see subclasses of Tensor, and a graph may not change the output of another one.
    traced = type(grad) is not Tensor
    if traced or torch.is_grad_enabled():
        return scale_rows(grad, factor, logits)
    _launch(grad, grad, factor)
    return grad
