"""From the gradient that a forward kernel made to the one that autograd asks for.

A forward kernel writes the gradient of its loss into a buffer of its own. The first backward
scales that buffer in place by the incoming gradient and hands it over: no second buffer, and where
the incoming gradient is 1 (a loss that is summed and called backward on) the kernel returns without
touching memory. The factor is read on the device, so nothing synchronises.
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


@triton.jit(do_not_specialize=["grad_ptr", "factor_ptr", "R", "K"])
def scale_rows_kernel(
    grad_ptr,  # [R, K] contiguous
    factor_ptr,  # [R] or []
    R,
    K,
    PER_ROW: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Multiply rows by their factor; a factor of 1 costs no memory traffic."""
    K = K // ALIGN * ALIGN
    if not PER_ROW and tl.load(factor_ptr) == 1.0:
        return
    for tile in range(tl.program_id(0), tl.cdiv(R, ROWS), tl.num_programs(0)):
        rows = row_offsets(tile, ROWS)
        in_matrix = rows < R
        if PER_ROW:
            factor = tl.load(factor_ptr + rows, mask=in_matrix, other=1.0)
        else:
            factor = tl.load(factor_ptr) + tl.zeros([ROWS], dtype=tl.float32)
        changes = in_matrix & (factor != 1.0)
        for start in range(0, K, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            in_tile = changes[:, None] & (cols < K)[None, :]
            pointers = aligned_pointers(grad_ptr, rows, K, cols, ALIGN)
            grad = tl.load(pointers, mask=in_tile, other=0.0).to(tl.float32) * factor[:, None]
            tl.store(pointers, grad.to(grad_ptr.dtype.element_ty), mask=in_tile)


@torch.library.custom_op("simpro_kernels::scale_rows_", mutates_args=("grad",))
def scale_rows_(grad: Tensor, factor: Tensor) -> None:
    """grad [R, K] contiguous *= factor, float32 [] or [R], in float32, rounded once."""
    num_rows, num_classes = grad.shape
    tile = tile_for(num_classes)
    with on_device_of(grad):
        scale_rows_kernel[(tile.programs(num_rows),)](
            grad,
            factor.contiguous(),
            num_rows,
            num_classes,
            PER_ROW=factor.dim() > 0,
            ALIGN=alignment(grad),
            ROWS=tile.rows,
            BLOCK=tile.block,
            num_warps=tile.warps,
        )


@scale_rows_.register_fake
def _(grad: Tensor, factor: Tensor) -> None:
    return None


@torch.library.custom_op("simpro_kernels::once_differentiable", mutates_args=())
def once_differentiable(grad: Tensor, logits: Tensor) -> Tensor:
    """``grad`` as a function of ``logits`` whose own derivative is refused."""
    return grad.clone()


@once_differentiable.register_fake
def _(grad: Tensor, logits: Tensor) -> Tensor:
    return torch.empty_like(grad)


def _refuse(ctx: object, grad: Tensor) -> None:
    raise RuntimeError(
        "the fused losses of simpro_kernels are differentiable once: use impl='eager' for a "
        "second derivative"
    )


once_differentiable.register_autograd(_refuse)


def hand_over(grad: Tensor, factor: Tensor, logits: Tensor) -> Tensor:
    """The gradient for autograd, from a buffer ``grad`` that nobody else holds.

    ``logits`` are the differentiated input: under ``create_graph=True`` they carry the graph to
    the error message, since a constant result would be silently wrong.
    """
    with torch.no_grad():
        scale_rows_(grad, factor)
    if torch.is_grad_enabled():
        return once_differentiable(grad, logits)
    return grad
